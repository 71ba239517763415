"""Evaluation beside training: a queue of its own to the same rollout and reward services, and nobody waits for it.

    version pushed and due --> sheet (services/evaluation/sheet.py)
                                 |  leases, within a share of each rollout server, after those of training
                                 v
                              rollout --> reward (a stream of its own) --> figures --> evals.jsonl, events, status

One evaluation at a time: what is not over when the next one is due is dropped, with a count. Its samples never enter
the book, so no batch, no bound of staleness and no ledger equation knows of them. Only the end of the run waits, until
the last evaluation is over or its deadline.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import protos
from services.evaluation.occasions import Facts, Occasions
from services.evaluation.sheet import Sheet
from services.faults import fault
from services.records.book import Book, Sample, State
from services.roster import Member
from services.stages.generation import RolloutLink, seed_of, within_budget
from services.stages.judging import Judging
from services.stages.routing import Routing

if TYPE_CHECKING:
    from services.config import Config
    from services.records.journalist import Journalist

GROUPS = 1 << 48
"""Seeds of an evaluation are those of groups from here on, which training never meets. All evaluations draw alike."""


class Evaluating:
    """The evaluations of a run, seen from the conductor; an `Aside` of services/stages/generation.py."""

    def __init__(
        self,
        config: Config,
        book: Book,
        ledger: Facts,
        journalist: Journalist,
        routing: Routing,
        *,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        on_end: Callable[[str, str], None],
    ) -> None:
        """Reads the prompts; ConfigError where they cannot be used.

        clock: seconds, for leases and the deadline.
        """
        self.config = config.evaluation
        self.sheet = Sheet()
        self.occasions = Occasions(config.evaluation, ledger, num_steps=config.run.num_steps)
        self._book = book
        self._run_seed = config.run.seed
        self._room_for_training = book.samples_per_group
        self._lease_seconds = config.conductor.lease_seconds
        self._sampling = config.evaluation_sampling()
        self._prompts = config.evaluation_prompts()
        self._journalist = journalist
        self._routing = routing
        self._clock = clock
        self._held: Counter[str] = Counter()
        """Samples that each server has and has not answered."""
        self._cancels: list[tuple[str, protos.SampleKey]] = []
        self._began: float | None = None
        self._give_up_at: float | None = None
        self.judging = Judging(
            self.sheet,
            max_attempts=config.conductor.max_score_attempts,
            post=post,
            on_quarantine=self.sheet.fail,
            on_end=on_end,
        )
        if self.occasions.memory.open and self.config.every_steps:
            self._begin(self.occasions.memory.version, "the conductor has come back: the evaluation is begun again")

    # What the conductor's loop asks.

    def pump(self) -> None:
        """End what is complete, begin what is due, ask for rewards."""
        if self.sheet.open and not self.sheet.unsettled:
            self._end()
        version = self._book.pushed_version
        if self.occasions.due(version):
            self.drop("the next one is due")
            self._begin(version, "an evaluation begins")
        self.judging.pump()

    def over(self) -> bool:
        """Asked when all is trained: whether the last evaluation has ended, too, or is given up."""
        if self.sheet.open:
            self._give_up_at = self._give_up_at or self._clock() + self.config.deadline_seconds
            if self._clock() > self._give_up_at:
                self.drop(f"it was not over {self.config.deadline_seconds:g} s after the last step")
        return not self.sheet.open

    @property
    def in_hand(self) -> bool:
        """Whether a rollout server has samples of an evaluation."""
        return any(self._held.values())

    async def rewire(self, member: Member, *, joined: bool) -> None:
        """Reward services have one stream for the scores of training and one for these."""
        if not self.config.every_steps or member.role != "reward":
            return
        if joined:
            await self.judging.connect(member)
        else:
            await self.judging.drop(member.name, "")

    async def close(self) -> None:
        await self.judging.close()

    def drop(self, reason: str) -> None:
        """Give the evaluation up that is under way, if there is one."""
        if not self.sheet.open:
            return
        version, unsettled = self.sheet.version, self.sheet.unsettled
        for sample in self.sheet.clear():
            self._held[sample.server] -= 1
            self._cancels.append((sample.server, self._key(sample)))
        self.occasions.drop()
        told = {"version": version, "why": reason, "unsettled": unsettled}
        self._journalist.tell("evaluation_dropped", "conductor", "an evaluation was given up", **told)

    # Leases: the Aside of services/stages/generation.py.

    def requests(
        self, links: Iterable[RolloutLink], lease_ids: Iterator[int]
    ) -> Iterator[tuple[RolloutLink, protos.GenerateRequest]]:
        by_name = {link.name: link for link in links}
        for server, key in self._cancels:
            if server in by_name:
                yield by_name[server], protos.GenerateRequest(cancels=[key])
        self._cancels.clear()
        serving = [link for name, link in by_name.items() if self.sheet.pending and self._routing.serves(name)]
        while self.sheet.pending and serving:
            link = max(serving, key=self._room)
            samples = self.sheet.take(self._room(link))
            if not samples:
                return
            yield link, protos.GenerateRequest(leases=[self._lease(link, samples, next(lease_ids))])
            fault("conductor", "evaluation.leased")

    def _room(self, link: RolloutLink) -> int:
        """Samples that a server may be given now; all it takes once training is over."""
        held = self._held[link.name]
        capacity = link.credit + link.in_hand + held
        if not self._routing.trained_all:
            share = max(int(self.config.share * capacity), 1)
            capacity = min(share, capacity - self._room_for_training)
        return max(min(link.credit, capacity - held), 0)

    def _lease(self, link: RolloutLink, samples: list[Sample], lease_id: int) -> protos.GroupLease:
        group = self.sheet.groups[samples[0].group]
        now = self._clock()
        self._began = now if self._began is None else self._began
        for sample in samples:
            self.sheet.lease(sample, lease_id=lease_id, server=link.name, deadline=now + self._lease_seconds)
        link.credit -= len(samples)
        self._held[link.name] += len(samples)
        return protos.GroupLease(
            lease_id=lease_id,
            group=group.position,
            evaluation=self.sheet.number,
            prompt=group.prompt,
            indices=[sample.index for sample in samples],
            seeds=[seed_of(self._run_seed, GROUPS + group.position, sample.index) for sample in samples],
            attempts=[sample.attempts for sample in samples],
            sampling=within_budget(self._sampling, group.prompt),
            ttl_ms=int(self._lease_seconds * 1000),
        )

    def take(self, trajectory: protos.Trajectory, reason: str) -> None:
        sample = self.sheet.leased(trajectory.key, trajectory.lease_id)
        if sample is None:
            return
        self._held[sample.server] -= 1
        if reason:
            self._again(sample, reason)
        else:
            self.sheet.generate(sample, trajectory)
            self.judging.want([sample])

    def nacked(self, nack: protos.Nack) -> None:
        sample = self.sheet.leased(nack.key, nack.lease_id)
        if sample is None:
            return
        self._held[sample.server] -= 1
        if nack.permanent:
            self.sheet.fail(sample, nack.reason)
        else:
            self._again(sample, nack.reason)

    def void(self, server: str, reason: str) -> None:
        self._held.pop(server, None)
        for sample in self._leased():
            if sample.server == server:
                self._again(sample, f"server_lost: {reason}")

    def expire(self) -> None:
        now = self._clock()
        for sample in self._leased():
            if sample.deadline < now:
                self._cancels.append((sample.server, self._key(sample)))
                self._held[sample.server] -= 1
                self._again(sample, "lease_expired")

    def _again(self, sample: Sample, reason: str) -> None:
        self.sheet.refused[reason.partition(":")[0]] += 1
        if sample.attempts < self._book.max_attempts:
            self.sheet.redo(sample)
        else:
            self.sheet.fail(sample, reason)

    def _leased(self) -> list[Sample]:
        groups = self.sheet.groups.values()
        return [sample for group in groups for sample in group.samples if sample.state is State.LEASED]

    def _key(self, sample: Sample) -> protos.SampleKey:
        return protos.SampleKey(group=sample.group, index=sample.index, evaluation=self.sheet.number)

    # Beginning and end.

    def _begin(self, version: int, message: str) -> None:
        number = self.occasions.begin(version)
        self._began = self._give_up_at = None
        each = self.config.samples_per_prompt
        self.sheet.fill(self._prompts, number=number, version=version, samples_per_prompt=each)
        told = {"version": version, "number": number, "samples": self.sheet.unsettled}
        self._journalist.tell("evaluation_begun", "conductor", message, **told)

    def _end(self) -> None:
        now = self._clock()
        result: dict[str, Any] = {
            "number": self.sheet.number,
            **self.sheet.result(ks=self.config.k, threshold=self.config.threshold),
            "seconds": round(now - (now if self._began is None else self._began), 3),
            "time": round(time.time(), 3),
        }
        self.sheet.clear()
        self.occasions.end(result)
        self._journalist.evaluation(result)
