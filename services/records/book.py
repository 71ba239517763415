"""Where every sample is. Pure state, no network and no disk: each change is also told to a journal.

    pending -> leased -> generated -> scored -> referenced -> batched(step) -> trained
                 | lease expires / nack -> pending (attempt + 1)
                 '-> quarantined   dropped(reason)

The ledger equation holds after every method: accepted = trained + dropped + quarantined + in_flight.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import protos

Key = tuple[int, int]
"""(group, index in the group)."""


class State(IntEnum):
    PENDING = 0
    LEASED = 1
    GENERATED = 2
    SCORED = 3
    REFERENCED = 4
    BATCHED = 5
    TRAINED = 6
    QUARANTINED = 7
    DROPPED = 8


FINAL = (State.TRAINED, State.QUARANTINED, State.DROPPED)


@dataclass(slots=True)
class Sample:
    """One attempt to complete one prompt, on its way."""

    group: int
    index: int
    baseline: bool = False
    """Drawn greedily beside the others of its group, for its reward; it is not trained on."""
    state: State = State.PENDING
    attempts: int = 0
    """Leases granted so far."""
    score_attempts: int = 0
    lease_id: int = 0
    server: str = ""
    deadline: float = 0.0
    """End of the lease by the granter's monotonic clock, in seconds."""
    ticket: int = 0
    """Of the open score request."""
    reference_ticket: int = 0
    oldest_version: int = 0
    """The oldest policy_version among its tokens, once generated."""
    trajectory: protos.Trajectory | None = None
    answer: str | None = None
    """What the reward read as its answer, for the majority of an evaluation; see reward/function.py."""

    @property
    def key(self) -> Key:
        return (self.group, self.index)


@dataclass(slots=True)
class Group:
    """The samples of one prompt."""

    position: int
    prompt: protos.Prompt
    samples: list[Sample]
    unsettled: int
    """Samples that are neither ready for training nor final."""

    def ready(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.state is State.REFERENCED]

    def drawn(self) -> list[Sample]:
        """The ready samples that are trained on."""
        return [sample for sample in self.ready() if not sample.baseline]

    def baseline(self) -> Sample | None:
        """The ready sample whose reward the others are compared with."""
        return next((sample for sample in self.ready() if sample.baseline), None)

    def oldest_version(self) -> int:
        """The oldest policy_version in the ready samples."""
        return min(sample.oldest_version for sample in self.ready())


@dataclass(slots=True)
class Batch:
    """What one step trains on, in the recorded order."""

    step: int
    keys: list[Key]
    trajectories: list[protos.Trajectory]
    staleness: Counter[int] = field(default_factory=Counter)


class Journal(Protocol):
    """Where the changes are made durable; see services/records/ledger.py."""

    def accepted(self, group: Group) -> None: ...
    def generated(self, sample: Sample) -> None: ...
    def scored(self, sample: Sample) -> None: ...
    def referenced(self, sample: Sample) -> None: ...
    def ended(self, sample: Sample, reason: str) -> None: ...
    def batched(self, batch: Batch) -> None: ...
    def trained(self, step: int) -> None: ...
    def pushed(self, version: int) -> None: ...
    def rewound(self, step: int) -> None: ...


class Book:
    """The state of all samples of a run."""

    def __init__(
        self,
        *,
        group_size: int,
        use_reference: bool,
        max_attempts: int,
        journal: Journal,
        with_baseline: bool = False,
    ) -> None:
        self.group_size = group_size
        """Samples of a prompt that are trained on; the one of this index is the baseline."""
        self.with_baseline = with_baseline
        self.samples_per_group = group_size + with_baseline
        self.use_reference = use_reference
        self.max_attempts = max_attempts
        self.journal = journal
        self.groups: dict[int, Group] = {}
        self.complete: set[int] = set()
        self.pending: deque[Sample] = deque()
        self.batches: dict[int, Batch] = {}
        self.unpushed: dict[int, int] = {}
        self.staleness: Counter[int] = Counter()
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.accepted = self.trained = self.quarantined = 0
        self.next_group = self.recorded_step = self.trained_step = self.pushed_version = 0
        self.outstanding = 0
        """Samples accepted and not yet in a pushed version, dropped or quarantined: what admission counts."""

    # Forward.

    def accept(self, prompt: protos.Prompt) -> Group:
        """Take the next prompt of the stream; its samples are pending, outside the redo queue."""
        position = self.next_group
        indices = range(self.samples_per_group)
        samples = [Sample(position, index, self.is_baseline(index)) for index in indices]
        group = Group(position, prompt, samples, len(samples))
        self.groups[position] = group
        self.next_group += 1
        self.accepted += len(samples)
        self.outstanding += len(samples)
        self.journal.accepted(group)
        return group

    def lease(self, sample: Sample, *, lease_id: int, server: str, deadline: float) -> None:
        assert sample.state is State.PENDING
        sample.state, sample.lease_id, sample.server, sample.deadline = State.LEASED, lease_id, server, deadline
        sample.attempts += 1

    def find(self, key: protos.SampleKey) -> Sample | None:
        group = self.groups.get(key.group)
        return group.samples[key.index] if group is not None and key.index < len(group.samples) else None

    def leased(self, key: protos.SampleKey, lease_id: int) -> Sample | None:
        """The sample that waits for this delivery; None (and counted) where the delivery is a duplicate or late."""
        sample = self.find(key)
        if sample is not None and sample.state is State.LEASED and sample.lease_id == lease_id:
            return sample
        late = sample is not None and sample.lease_id != lease_id
        self.refused["late" if late else "duplicate"] += 1
        return None

    def generate(self, sample: Sample, trajectory: protos.Trajectory) -> None:
        assert sample.state is State.LEASED
        sample.state, sample.trajectory = State.GENERATED, trajectory
        sample.oldest_version = min(span.policy_version for span in trajectory.spans)
        self.journal.generated(sample)

    def score(self, sample: Sample, *, value: float, breakdown: dict[str, float], route: str) -> None:
        assert sample.state is State.GENERATED and sample.trajectory is not None
        trajectory = sample.trajectory
        trajectory.reward, trajectory.reward_route = value, route
        trajectory.reward_breakdown.update(breakdown)
        sample.state, sample.ticket = State.SCORED, 0
        self.journal.scored(sample)
        self._settle_if_ready(sample)

    def refer(self, sample: Sample, logprobs: protos.Array) -> None:
        """Store reference logprobs; they may come before or after the reward."""
        assert sample.state in (State.GENERATED, State.SCORED) and sample.trajectory is not None
        sample.trajectory.reference_logprobs.CopyFrom(logprobs)
        sample.reference_ticket = 0
        self.journal.referenced(sample)
        self._settle_if_ready(sample)

    def record(self, step: int, groups: Sequence[Group]) -> Batch:
        """Fix membership and order of the batch of `step` and take its groups out of the open ones."""
        assert step == self.recorded_step + 1
        samples = [sample for group in groups for sample in group.ready()]
        trajectories = [sample.trajectory for sample in samples if sample.trajectory is not None]
        batch = Batch(step, [sample.key for sample in samples], trajectories)
        for sample in samples:
            batch.staleness[step - 1 - sample.oldest_version] += 1
            sample.state = State.BATCHED
        for group in groups:
            self._remove(group)
        self._add_batch(batch)
        self.recorded_step = step
        self.journal.batched(batch)
        return batch

    def train(self, step: int) -> bool:
        """Count a step as trained; False for a report that was counted already."""
        batch = self.batches.pop(step, None)
        if batch is None:
            self.refused["report"] += 1
            return False
        self.trained += len(batch.keys)
        self.trained_step = max(self.trained_step, step)
        self.staleness.update(batch.staleness)
        self.journal.trained(step)
        return True

    def push(self, version: int) -> None:
        """The rollout servers have `version`: the samples of its step and of earlier ones make room for new ones."""
        for step in [step for step in self.unpushed if step <= version]:
            self.outstanding -= self.unpushed.pop(step)
        self.pushed_version = max(self.pushed_version, version)
        self.journal.pushed(self.pushed_version)

    def outstanding_at(self, version: int) -> int:
        """What is outstanding for a server that has `version`: the steps up to it have made room there already."""
        return self.outstanding - sum(count for step, count in self.unpushed.items() if step <= version)

    # Sideways.

    def redo(self, sample: Sample) -> None:
        """Give a leased sample back: pending again."""
        assert sample.state is State.LEASED
        sample.state, sample.lease_id, sample.server = State.PENDING, 0, ""
        self.pending.append(sample)

    def quarantine(self, sample: Sample, reason: str) -> None:
        self.quarantined += 1
        self._end(sample, State.QUARANTINED, reason)

    def drop(self, sample: Sample, reason: str) -> None:
        self.dropped[reason] += 1
        self._end(sample, State.DROPPED, reason)

    def drop_group(self, group: Group, reason: str) -> None:
        """Drop what is left of a complete group."""
        for sample in group.ready():
            self.drop(sample, reason)
        self._remove_if_empty(group)

    def rewind(self, step: int, batches: Iterable[Batch]) -> None:
        """The trainer came back with the weights of `step`: later batches, read from the ledger, are open again."""
        for batch in batches:
            if batch.step in self.batches:
                continue
            self.trained -= len(batch.keys)
            self.staleness.subtract(batch.staleness)
            self.batches[batch.step] = batch
            if batch.step not in self.unpushed:
                self.unpushed[batch.step] = len(batch.keys)
                self.outstanding += len(batch.keys)
        self.batches = dict(sorted(self.batches.items()))
        self.trained_step = min(self.trained_step, step)
        self.pushed_version = min(self.pushed_version, step)
        self.journal.rewound(step)
        self.journal.pushed(self.pushed_version)

    # Sight.

    def samples(self, *states: State) -> Iterator[Sample]:
        return (sample for group in self.groups.values() for sample in group.samples if sample.state in states)

    def counts(self) -> protos.LedgerCounts:
        """Count every sample where it is; `balanced` says whether the ledger equation holds."""
        states = Counter(
            sample.state.name.lower()
            for group in self.groups.values()
            for sample in group.samples
            if sample.state not in FINAL
        )
        states["batched"] += sum(len(batch.keys) for batch in self.batches.values())
        in_flight = sum(states.values())
        ended = self.trained + sum(self.dropped.values()) + self.quarantined
        return protos.LedgerCounts(
            accepted=self.accepted,
            trained=self.trained,
            dropped=self.dropped,
            quarantined=self.quarantined,
            in_flight=in_flight,
            states=+states,
            refused=self.refused,
            balanced=self.accepted == ended + in_flight,
        )

    def is_baseline(self, index: int) -> bool:
        return self.with_baseline and index == self.group_size

    def lacks_reference(self, sample: Sample) -> bool:
        """Whether a generated sample still needs reference logprobs; a baseline does not."""
        assert sample.trajectory is not None
        wanted = self.use_reference and not sample.baseline
        return wanted and not sample.trajectory.HasField("reference_logprobs")

    # Inside.

    def _settle_if_ready(self, sample: Sample) -> None:
        if sample.state is State.SCORED and not self.lacks_reference(sample):
            sample.state = State.REFERENCED
            self._settled(self.groups[sample.group])

    def _end(self, sample: Sample, state: State, reason: str) -> None:
        assert sample.state < State.BATCHED
        settled = sample.state is State.REFERENCED
        group = self.groups[sample.group]
        self.outstanding -= 1
        sample.state = state
        self.journal.ended(sample, reason)
        if not settled:
            self._settled(group)

    def _settled(self, group: Group) -> None:
        group.unsettled -= 1
        if group.unsettled == 0:
            self.complete.add(group.position)
            self._remove_if_empty(group)

    def _remove_if_empty(self, group: Group) -> None:
        if all(sample.state in FINAL for sample in group.samples):
            self._remove(group)

    def _remove(self, group: Group) -> None:
        self.complete.discard(group.position)
        self.groups.pop(group.position, None)

    def _add_batch(self, batch: Batch) -> None:
        self.batches[batch.step] = batch
        self.unpushed[batch.step] = len(batch.keys)
