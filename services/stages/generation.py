"""Prompts out, trajectories in: leases are granted to rollout servers, and what comes back is checked and booked."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import protos
from services.evaluation.aside import Aside, Nothing
from services.faults import fault
from services.records.book import Book, Sample, State
from services.roster import Member
from services.stages.intake import all_finite, refuse
from services.stages.link import Link

logger = logging.getLogger(__name__)
RolloutLink = Link[protos.GenerateRequest, protos.GenerateReply]
MASK = (1 << 64) - 1


class NextPrompt(Protocol):
    """Where prompts come from: position in the stream -> prompt."""

    def __call__(self, position: int) -> protos.Prompt: ...


def seed_of(run_seed: int, group: int, index: int) -> int:
    """A sample's own seed (splitmix64 over run, group and index): a second attempt draws the same tokens."""
    value = (run_seed * 0x9E3779B97F4A7C15 + group * 0xBF58476D1CE4E5B9 + index + 1) & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & MASK
    return (value ^ (value >> 31)) >> 1


def within_budget(sampling: protos.SamplingParams, prompt: protos.Prompt) -> protos.SamplingParams:
    """How samples of a prompt are drawn: one with a budget of its own, extra["max_tokens"], may lower max_tokens."""
    budget = prompt.extra.get("max_tokens")
    if budget is None or int(budget) >= sampling.max_tokens:
        return sampling
    own = protos.SamplingParams()
    own.CopyFrom(sampling)
    own.max_tokens = int(budget)
    return own


def greedy(sampling: protos.SamplingParams) -> protos.SamplingParams:
    """How the baseline of a group is drawn: the most likely token, always."""
    own = protos.SamplingParams()
    own.CopyFrom(sampling)
    own.temperature = 0.0
    return own


class Routes(Protocol):
    """Which server may begin what; services/stages/routing.py in a run."""

    def in_order(self, links: Iterable[RolloutLink]) -> Sequence[tuple[RolloutLink, int]]:
        """(link, version) of the servers that take a group now, the best one first."""

    def may_accept(self, version: int) -> bool:
        """Whether a server of this version may begin the next group."""

    def may_redo(self, version: int) -> bool:
        """Whether a server of this version may begin samples anew that were accepted before."""


class Generation:
    """The rollout servers of a run, seen from the conductor."""

    def __init__(
        self,
        book: Book,
        *,
        sampling: protos.SamplingParams,
        run_seed: int,
        life: int,
        lease_seconds: float,
        next_prompt: NextPrompt,
        routing: Routes,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        on_generated: Callable[[list[Sample]], None],
        on_end: Callable[[str, str], None],
        on_quarantine: Callable[[Sample, str], None],
        aside: Aside | None = None,
    ) -> None:
        """`aside`: other work of the same servers; None: there is none."""
        self.book = book
        self._aside: Aside = aside or Nothing()
        self.links: dict[str, RolloutLink] = {}
        self.num_tokens = 0
        self._sampling = sampling
        self._run_seed = run_seed
        self._lease_seconds = lease_seconds
        self._next_prompt = next_prompt
        self._routing = routing
        self._clock = clock
        self._post = post
        self._on_generated = on_generated
        self._on_end = on_end
        self._on_quarantine = on_quarantine
        self._lease_ids = itertools.count((life << 32) + 1)  # unique over the conductor's lives
        self._by_server: dict[str, set[tuple[int, int]]] = {}

    async def connect(self, member: Member) -> None:
        """Open a stream to a server that has joined, in place of an older one to it."""
        await self.drop(member.name, "joined again")
        member.first_lease = next(self._lease_ids)
        self._by_server[member.name] = set()
        self.links[member.name] = Link(
            member.name,
            member.address,
            open_stream=lambda channel: protos.RolloutStub(channel).Generate(),
            on_reply=lambda link, reply: self._post(lambda: self._replied(link, reply)),
            on_end=lambda link, reason: self._post(lambda: self._ended(link, reason)),
        )

    async def drop(self, name: str, reason: str) -> None:
        """Close the stream to a server; its leases are void."""
        link = self.links.pop(name, None)
        if link is not None:
            await link.close()
            self._void(name, reason)

    def in_hand(self, name: str) -> int:
        return self.links[name].in_hand if name in self.links else 0

    async def close(self) -> None:
        for link in list(self.links.values()):
            await link.close()
        self.links.clear()

    # Leases.

    def pump(self) -> None:
        """Grant leases while a server has credit and the staleness bound admits samples: one message a server.

        What the servers do beside training takes what credit is left.
        """
        messages: dict[str, protos.GenerateRequest] = {}
        while (found := self._next_match()) is not None:
            link, samples = found
            request = messages.setdefault(link.name, protos.GenerateRequest())
            request.leases.extend(self._leases(link, samples))
        for link, request in self._aside.requests(self.links.values(), self._lease_ids):
            messages.setdefault(link.name, protos.GenerateRequest()).MergeFrom(request)
        for name, request in messages.items():
            self.links[name].send(request)
        if messages:
            fault("conductor", "leases.sent")

    def _next_match(self) -> tuple[RolloutLink, list[Sample]] | None:
        """A server and the samples that it may begin now."""
        for link, version in self._routing.in_order(self.links.values()):
            if samples := self._next_work(version):
                return link, samples
        return None

    def _next_work(self, version: int) -> list[Sample]:
        """Samples of one group for a server of `version`: those to be redone first, then the next prompt."""
        if self.book.pending and self._routing.may_redo(version):
            group = self.book.groups[self.book.pending[0].group]
            wanted = [sample for sample in group.samples if sample.state is State.PENDING]
            for sample in wanted:
                self.book.pending.remove(sample)
            return wanted
        if not self._routing.may_accept(version):
            return []
        return self.book.accept(self._next_prompt(self.book.next_group)).samples

    def _leases(self, link: RolloutLink, samples: list[Sample]) -> Iterator[protos.GroupLease]:
        """One for the drawn samples of a group, one for its baseline."""
        for baseline in (False, True):
            if alike := [sample for sample in samples if sample.baseline is baseline]:
                yield self._lease(link, alike, baseline=baseline)

    def _lease(self, link: RolloutLink, samples: list[Sample], *, baseline: bool) -> protos.GroupLease:
        group = self.book.groups[samples[0].group]
        lease_id = next(self._lease_ids)
        deadline = self._clock() + self._lease_seconds
        for sample in samples:
            self.book.lease(sample, lease_id=lease_id, server=link.name, deadline=deadline)
            self._by_server[link.name].add(sample.key)
        link.credit -= len(samples)
        link.in_hand += len(samples)
        return protos.GroupLease(
            lease_id=lease_id,
            group=group.position,
            prompt=group.prompt,
            indices=[sample.index for sample in samples],
            seeds=[seed_of(self._run_seed, group.position, sample.index) for sample in samples],
            attempts=[sample.attempts for sample in samples],
            sampling=within_budget(greedy(self._sampling) if baseline else self._sampling, group.prompt),
            ttl_ms=int(self._lease_seconds * 1000),
            baseline=baseline,
        )

    def expire(self) -> None:
        """Take back leases whose deadline has passed."""
        now = self._clock()
        for sample in list(self.book.samples(State.LEASED)):
            if sample.deadline < now:
                logger.warning("lease expired", extra={"facts": {"sample": sample.key, "server": sample.server}})
                self.book.refused["expired_lease"] += 1
                self._cancel(sample)
                self._release(sample)
                self._redo(sample, "lease_expired")
        self._aside.expire()

    def _cancel(self, sample: Sample) -> None:
        if sample.server in self.links:
            key = protos.SampleKey(group=sample.group, index=sample.index)
            self.links[sample.server].send(protos.GenerateRequest(cancels=[key]))

    # Replies.

    def _replied(self, link: RolloutLink, reply: protos.GenerateReply) -> None:
        if self.links.get(link.name) is not link:
            self.book.refused["late"] += len(reply.trajectories)
            return
        link.credit += reply.credit.samples
        self.num_tokens += reply.num_generated_tokens
        newest = self.book.recorded_step
        finite = all_finite(reply.trajectories)
        generated = []
        for trajectory in reply.trajectories:
            reason = refuse(trajectory, newest_version=newest, finite=finite)
            if trajectory.key.evaluation:
                self._aside.take(trajectory, reason)
            elif (sample := self._take(link, trajectory, reason)) is not None:
                generated.append(sample)
        for nack in reply.nacks:
            self._nacked(link, nack)
        self._on_generated(generated)

    def _take(self, link: RolloutLink, trajectory: protos.Trajectory, reason: str) -> Sample | None:
        sample = self.book.leased(trajectory.key, trajectory.lease_id)
        if sample is None:
            return None
        self._release(sample)
        if not reason and trajectory.baseline != sample.baseline:
            reason = "baseline_not_as_leased"
        if reason:
            logger.warning(
                "trajectory refused", extra={"facts": {"sample": sample.key, "server": link.name, "why": reason}}
            )
            self.book.refused[reason] += 1
            self._redo(sample, reason)
            return None
        trajectory.server = link.name
        self.book.generate(sample, trajectory)
        return sample

    def _nacked(self, link: RolloutLink, nack: protos.Nack) -> None:
        if nack.reason == "draining":
            link.credit = 0
        if nack.key.evaluation:
            self._aside.nacked(nack)
            return
        sample = self.book.leased(nack.key, nack.lease_id)
        if sample is None:
            return
        self._release(sample)
        self.book.refused[f"nack_{nack.reason}"] += 1
        if nack.permanent:
            self._on_quarantine(sample, f"{nack.reason}: {nack.detail}")
        else:
            self._redo(sample, nack.reason)

    # Losses.

    def _ended(self, link: RolloutLink, reason: str) -> None:
        if self.links.get(link.name) is link:
            del self.links[link.name]
            self._void(link.name, reason)
            self._on_end(link.name, reason)

    def _void(self, server: str, reason: str) -> None:
        self._aside.void(server, reason)
        keys = sorted(self._by_server.pop(server, set()))
        groups = ((self.book.groups[group].samples[index]) for group, index in keys if group in self.book.groups)
        for sample in groups:
            if sample.state is State.LEASED and sample.server == server:
                self._redo(sample, f"server_lost: {reason}")

    def _redo(self, sample: Sample, reason: str) -> None:
        if sample.attempts >= self.book.max_attempts:
            self._on_quarantine(sample, reason)
        else:
            self.book.redo(sample)

    def _release(self, sample: Sample) -> None:
        """A lease has ended, one way or another."""
        link = self.links.get(sample.server)
        if link is not None:
            link.in_hand -= 1
            self._by_server[sample.server].discard(sample.key)
