"""The life of samples as a state machine: the real book on one side, one dictionary on the other."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import protos
from protos.arrays import to_array
from services.records.book import Batch, Book, Group, Journal, Sample, State
from services.roster import Roster
from services.stages.routing import Routing

GROUP_SIZE = 3
PROMPTS_PER_STEP = 2
MAX_STALENESS = 1
BOUND = (MAX_STALENESS + 1) * PROMPTS_PER_STEP * GROUP_SIZE
RUN = SimpleNamespace(
    num_steps=1000, prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE, max_staleness=MAX_STALENESS
)
Key = tuple[int, int]
AT = st.integers(0, 1000)
"""Which one of a list that is only known when the rule runs."""


def made_trajectory(
    key: Key, *, lease_id: int = 1, version: int = 0, spans: int = 1, baseline: bool = False
) -> protos.Trajectory:
    """A generated sample of two tokens a span, the first span by `version`."""
    num_tokens = 2 * spans
    return protos.Trajectory(
        key=protos.SampleKey(group=key[0], index=key[1]),
        lease_id=lease_id,
        attempt=1,
        prompt_ids=to_array(np.array([5, key[0] % 7], np.int32)),
        response_ids=to_array(np.arange(num_tokens, dtype=np.int32)),
        behaviour_logprobs=to_array(np.full(num_tokens, -0.5, np.float32)),
        spans=[protos.VersionSpan(policy_version=version + span, num_tokens=2) for span in range(spans)],
        response_text="a\x00b",
        server="rollout-0",
        baseline=baseline,
    )


class LifeOfSamples(RuleBasedStateMachine):
    """`place` says where each sample is; every rule changes it and the book alike."""

    def __init__(self) -> None:
        super().__init__()
        self.place: dict[Key, str] = {}
        self.reason: dict[Key, str] = {}
        self.batched_in: dict[Key, int] = {}
        self.history: dict[int, Batch] = {}
        self.version_of: dict[Key, int] = {}
        self.pushed = 0
        self.with_room: set[int] = set()
        """Steps whose version was pushed: their samples have made room for others."""
        self.lease_id = 0
        self.refused = 0
        self.use_reference = False
        self.num_drawn = GROUP_SIZE
        """Samples of a group beside its baseline."""

    def make_journal(self) -> Journal:
        raise AssertionError("a subclass says where the changes are told")

    def recorded_after(self, step: int) -> list[Batch]:
        return [batch for number, batch in sorted(self.history.items()) if number > step]

    @initialize(use_reference=st.booleans(), with_baseline=st.booleans())
    def open(self, use_reference: bool, with_baseline: bool) -> None:
        self.use_reference = use_reference
        self.num_drawn = GROUP_SIZE - with_baseline
        self.book = self.make_book(self.make_journal())

    def make_book(self, journal: Journal) -> Book:
        return Book(
            group_size=self.num_drawn,
            with_baseline=self.num_drawn < GROUP_SIZE,
            use_reference=self.use_reference,
            max_attempts=3,
            journal=journal,
        )

    # Forward.

    def may_accept(self) -> bool:
        routing = Routing(Roster(heartbeat_seconds=1.0), self.book, RUN, max_version_skew=0)
        return routing.may_accept(self.book.pushed_version)

    @precondition(lambda self: self.may_accept())
    @rule()
    def accept(self) -> None:
        group = self.book.accept(protos.Prompt(prompt_id=f"p/{self.book.next_group}", epoch=1))
        for sample in group.samples:
            self.place[sample.key] = "pending"
        assert self.book.outstanding <= BOUND

    @precondition(lambda self: self.at("pending"))
    @rule(at=AT)
    def lease(self, at: int) -> None:
        sample = self.pick(at, "pending")
        if sample in self.book.pending:
            self.book.pending.remove(sample)
        self.lease_id += 1
        self.book.lease(sample, lease_id=self.lease_id, server="rollout-0", deadline=1.0)
        self.place[sample.key] = "leased"

    @precondition(lambda self: self.at("leased"))
    @rule(at=AT, spans=st.integers(1, 2), age=st.integers(0, 2))
    def generate(self, at: int, spans: int, age: int) -> None:
        sample = self.pick(at, "leased")
        found = self.book.leased(protos.SampleKey(group=sample.group, index=sample.index), sample.lease_id)
        assert found is sample
        version = max(self.book.pushed_version - age, 0)
        self.book.generate(sample, made_trajectory(sample.key, lease_id=sample.lease_id, version=version, spans=spans))
        self.place[sample.key], self.version_of[sample.key] = "generated", version

    @precondition(lambda self: self.place)
    @rule(at=AT, lease_id=st.integers(0, 3))
    def deliver_late_or_twice(self, at: int, lease_id: int) -> None:
        key = sorted(self.place)[at % len(self.place)]
        sample = self.book.find(protos.SampleKey(group=key[0], index=key[1]))
        if self.place[key] == "leased" and sample is not None and sample.lease_id == lease_id:
            return
        assert self.book.leased(protos.SampleKey(group=key[0], index=key[1]), lease_id) is None
        self.refused += 1

    @precondition(lambda self: self.at("generated"))
    @rule(at=AT, value=st.sampled_from([0.0, 1.0, -2.5]))
    def score(self, at: int, value: float) -> None:
        sample = self.pick(at, "generated")
        self.book.score(sample, value=value, breakdown={"a": value, "b": 0.1}, route="r@1")
        self.place[sample.key] = "scored"
        self.settle(sample)

    @precondition(lambda self: self.use_reference and self.unreferred())
    @rule(at=AT)
    def refer(self, at: int) -> None:
        candidates = self.unreferred()
        sample = candidates[at % len(candidates)]
        assert sample.trajectory is not None
        num_tokens = sample.trajectory.response_ids.shape[0]
        self.book.refer(sample, to_array(np.full(num_tokens, -0.25, np.float32)))
        self.settle(sample)

    def settle(self, sample: Sample) -> None:
        if self.place[sample.key] == "scored" and (not self.use_reference or sample not in self.unreferred()):
            self.place[sample.key] = "referenced"

    @precondition(lambda self: self.book.groups)
    @rule(at=AT, age=st.integers(0, 2))
    def bring_a_group_on(self, at: int, age: int) -> None:
        """All at once what single rules do step by step, so that many batches are formed and trained on."""
        positions = sorted(self.book.groups)
        group = self.book.groups[positions[at % len(positions)]]
        for sample in group.samples:
            spot = self.at(self.place[sample.key]).index(sample.key)
            if sample.state is State.PENDING:
                self.lease(spot)
            if sample.state is State.LEASED:
                self.generate(self.at("leased").index(sample.key), 1, age)
            if self.use_reference and sample in self.unreferred():
                self.refer(self.unreferred().index(sample))
            if sample.state is State.GENERATED:
                self.score(self.at("generated").index(sample.key), 1.0)

    # Sideways.

    @precondition(lambda self: self.at("leased"))
    @rule(at=AT)
    def redo(self, at: int) -> None:
        sample = self.pick(at, "leased")
        self.book.redo(sample)
        self.place[sample.key] = "pending"

    @precondition(lambda self: self.at("leased", "generated", "scored"))
    @rule(at=AT)
    def quarantine(self, at: int) -> None:
        sample = self.pick(at, "leased", "generated", "scored")
        self.book.quarantine(sample, "reward_crash: why\n")
        self.place[sample.key] = "quarantined"

    @precondition(lambda self: self.book.complete)
    @rule(at=AT, reason=st.sampled_from(["stale", "invalid", "filtered"]))
    def drop_group(self, at: int, reason: str) -> None:
        positions = sorted(self.book.complete)
        group = self.book.groups[positions[at % len(positions)]]
        for sample in group.ready():
            self.place[sample.key], self.reason[sample.key] = "dropped", reason
        self.book.drop_group(group, reason)

    # Steps.

    @precondition(lambda self: len(self.book.complete) >= PROMPTS_PER_STEP)
    @rule()
    def record(self) -> None:
        step = self.book.recorded_step + 1
        groups = [self.book.groups[position] for position in sorted(self.book.complete)[:PROMPTS_PER_STEP]]
        expected = [sample.key for group in groups for sample in group.ready()]
        self.history[step] = self.book.record(step, groups)
        assert self.history[step].keys == expected
        for key in expected:
            self.place[key], self.batched_in[key] = "batched", step

    @precondition(lambda self: self.book.batches)
    @rule()
    def train(self) -> None:
        self.report(min(self.book.batches))

    def report(self, step: int) -> None:
        assert self.book.train(step)
        assert not self.book.train(step)  # a report that comes twice counts once
        self.refused += 1
        for key in self.keys_of(step):
            self.place[key] = "trained"

    @precondition(lambda self: self.book.trained_step > 0)
    @rule(behind=st.integers(0, 1))
    def push(self, behind: int) -> None:
        version = max(self.book.trained_step - behind, 0)
        self.book.push(version)
        self.pushed = max(self.pushed, version)
        self.with_room |= {step for step in self.history if step <= version}

    @precondition(lambda self: not self.book.batches and self.may_accept())
    @rule(age=st.integers(0, 1))
    def run_a_step(self, age: int) -> None:
        """From accepted prompts to a pushed version in one go, so that there is a past to come back to."""
        while len(self.book.groups) < PROMPTS_PER_STEP and self.may_accept():
            self.accept()
        for at in range(len(self.book.groups)):
            self.bring_a_group_on(at, age)
        if len(self.book.complete) >= PROMPTS_PER_STEP:
            self.record()
            self.train()
            self.push(0)

    @precondition(lambda self: self.book.recorded_step > 0)
    @rule(lost=st.integers(-1, 3))
    def trainer_comes_back(self, lost: int) -> None:
        """With the weights of an earlier step, or of one whose report was lost, as services/stages/training.py."""
        version = min(max(self.book.trained_step - lost, 0), self.book.recorded_step)
        self.book.rewind(version, self.recorded_after(version))
        self.pushed = min(self.pushed, version)
        for step in [step for step in self.history if step > version]:
            self.with_room.discard(step)
            for key in self.keys_of(step):
                self.place[key] = "batched"
        for step in [step for step in self.book.batches if step <= version]:
            self.report(step)

    # What must hold after every rule.

    @invariant()
    def the_book_says_what_the_dictionary_says(self) -> None:
        if not hasattr(self, "book"):
            return
        places = Counter(self.place.values())
        counts = self.book.counts()
        assert counts.balanced
        assert counts.accepted == len(self.place)
        assert (counts.trained, counts.quarantined) == (places["trained"], places["quarantined"])
        assert dict(counts.dropped) == Counter(self.reason.values())
        flying = {name: count for name, count in places.items() if name not in ("trained", "quarantined", "dropped")}
        assert dict(counts.states) == flying
        assert counts.in_flight == sum(flying.values())
        assert sum(counts.refused.values()) == self.refused

    @invariant()
    def versions_and_staleness_follow_the_trained_steps(self) -> None:
        if not hasattr(self, "book"):
            return
        trained = {key: self.batched_in[key] for key in self.at("trained")}
        ages = Counter(step - 1 - self.version_of[key] for key, step in trained.items())
        assert +self.book.staleness == ages
        assert self.book.trained_step == max(trained.values(), default=0)
        assert self.book.recorded_step == max(self.history, default=0)
        assert self.book.pushed_version == self.pushed

    @invariant()
    def outstanding_is_what_has_made_no_room_yet(self) -> None:
        if not hasattr(self, "book"):
            return
        made_room = {key for key, step in self.batched_in.items() if step in self.with_room}
        gone = {key for key, place in self.place.items() if place in ("quarantined", "dropped")}
        assert self.book.outstanding == len(self.place) - len(made_room) - len(gone)

    @invariant()
    def no_sample_is_in_two_places(self) -> None:
        if not hasattr(self, "book"):
            return
        waiting = [sample.key for sample in self.book.pending]
        assert len(waiting) == len(set(waiting))
        assert all(self.place[key] == "pending" for key in waiting)
        in_groups = [sample.key for group in self.book.groups.values() for sample in group.samples]
        in_batches = [key for batch in self.book.batches.values() for key in batch.keys]
        assert len(in_batches) == len(set(in_batches))
        assert not set(in_batches) & set(in_groups)
        assert {key for key, place in self.place.items() if place == "batched"} == set(in_batches)
        assert all(len(batch.trajectories) == len(batch.keys) for batch in self.book.batches.values())

    @invariant()
    def a_group_is_complete_when_nothing_in_it_is_open(self) -> None:
        if not hasattr(self, "book"):
            return
        for position, group in self.book.groups.items():
            assert group.unsettled == sum(sample.state < State.REFERENCED for sample in group.samples)
            assert (position in self.book.complete) == (group.unsettled == 0)
            assert self.is_open(group)
        assert self.book.complete <= set(self.book.groups)

    # Sight.

    def at(self, *places: str) -> list[Key]:
        return sorted(key for key, place in self.place.items() if place in places)

    def pick(self, at: int, *places: str) -> Sample:
        keys = self.at(*places)
        key = keys[at % len(keys)]
        sample = self.book.find(protos.SampleKey(group=key[0], index=key[1]))
        assert sample is not None
        return sample

    def unreferred(self) -> list[Sample]:
        """Generated samples without reference logprobs; a baseline needs none."""
        found = [self.pick(at, "generated", "scored") for at in range(len(self.at("generated", "scored")))]
        drawn = [sample for sample in found if sample.index < self.num_drawn]
        return [s for s in drawn if s.trajectory is not None and not s.trajectory.HasField("reference_logprobs")]

    def keys_of(self, step: int) -> list[Key]:
        return [key for key, number in self.batched_in.items() if number == step]

    def is_open(self, group: Group) -> bool:
        return any(self.place[sample.key] not in ("quarantined", "dropped") for sample in group.samples)


Telling = Callable[..., None]


class Silence:
    """A journal for tests that read none; `told` counts what was said."""

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Telling:
        def tell(*_: Any) -> None:
            self.told[name] += 1

        return tell
