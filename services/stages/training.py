"""The trainer, seen from the conductor: batches are formed, recorded, sent, and counted when reported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import protos
from services.actor import cancel
from services.channel import call
from services.errors import PeerError
from services.faults import fault
from services.records.book import Batch, Book, Group
from services.records.ledger import Ledger
from services.roster import Member
from services.stages.filtering import Filtering
from services.stages.link import Link
from services.stages.sharing import Sharing

logger = logging.getLogger(__name__)
TrainerLink = Link[protos.TrainRequest, protos.TrainReply]
BATCHES_AHEAD = 2
"""Recorded batches at the trainer: the one in work and the next, so that a step never waits for the wire."""


class Rules(Protocol):
    """What the run's config says about batches."""

    num_steps: int
    prompts_per_step: int
    max_staleness: int
    staleness_policy: str
    min_group_samples: int
    dynamic_sampling: int


class Training:
    """Forms batches and drives the trainer; owns the order of steps."""

    def __init__(
        self,
        book: Book,
        ledger: Ledger,
        rules: Rules,
        *,
        sharing: Sharing,
        push_seconds: float,
        crew_size: int | None,
        members: Callable[[], Iterable[Member]],
        incarnation: Callable[[], int],
        post: Callable[[Callable[[], None]], None],
        on_report: Callable[[protos.StepReport, Batch], None],
        on_stop: Callable[[protos.StepReport], None],
        on_push: Callable[[protos.PushReport], None],
        on_checkpoint: Callable[[protos.CheckpointReport], None],
        on_end: Callable[[str, str], None],
    ) -> None:
        self.book = book
        self.ledger = ledger
        self.rules = rules
        self.sharing = sharing
        self.filtering = Filtering(limit=rules.dynamic_sampling)
        self.link: TrainerLink | None = None
        self.ready = False
        """The trainer has synchronized the rollout servers since it joined: it may be fed."""
        self._incarnation = 0
        self._current_incarnation = incarnation
        self._push_seconds = push_seconds
        self._crew_size = crew_size
        self._members = members
        self._post = post
        self._on_report = on_report
        self._on_stop = on_stop
        self._on_push = on_push
        self._on_checkpoint = on_checkpoint
        self._on_end = on_end
        self._unsent: list[int] = []
        self._replay_until = 0
        self._joined_version = 0
        self._sync_wanted = asyncio.Event()
        self._syncing = False
        self._idle = asyncio.Event()
        """With time sharing: the trainer has no batch whose push is still to come."""
        self._sync_task: asyncio.Task[None] | None = None

    # Membership.

    async def connect(self, member: Member) -> None:
        """Take on a trainer that has joined with the weights of `member.policy_version`."""
        await self.drop(member.name, "joined again")
        await self.ledger.durable()
        self.book.rewind(member.policy_version, self.ledger.batches(after=member.policy_version))
        self._incarnation = self._current_incarnation()
        self._replay_until = self.book.recorded_step
        self._joined_version = member.policy_version
        self._unsent = [step for step in self.book.batches if step > member.policy_version]
        self.link = Link(
            member.name,
            member.address,
            open_stream=lambda channel: protos.TrainerStub(channel).Train(),
            on_reply=lambda link, reply: self._post(lambda: self._replied(link, reply)),
            on_end=lambda link, reason: self._post(lambda: self._ended(link, reason)),
        )
        self._syncing = False
        self._idle.set()
        self._sync_task = asyncio.create_task(self._sync_when_wanted(self.link), name="sync-rollouts")
        self.want_sync()

    def in_hand(self, name: str) -> int:
        return sum(len(batch.keys) for batch in self.book.batches.values())

    async def close(self) -> None:
        await self.drop("", "the conductor is closing")

    async def drop(self, name: str, reason: str) -> None:
        link, self.link, self.ready = self.link, None, False
        if self._sync_task is not None:
            await cancel(self._sync_task)
            self._sync_task = None
        if link is not None:
            await link.close()

    def want_sync(self) -> None:
        """The set of rollout servers has changed: the trainer must know, and new ones need the current version."""
        self._sync_wanted.set()

    async def _sync_when_wanted(self, link: TrainerLink) -> None:
        stub = protos.TrainerStub(link.channel)
        while True:
            await self._sync_wanted.wait()
            while not self._idle.is_set():  # a push would wake servers in the middle of a step
                await self._idle.wait()
            self._sync_wanted.clear()
            self._syncing = True
            servers = [self._address(member) for member in self._members()]
            request = protos.SyncRolloutsRequest(servers=servers, whole_membership=True)
            try:
                reply = await call(
                    stub.SyncRollouts,
                    request,
                    deadline_seconds=(2 * self._push_seconds + 5) * self._num_crews(len(servers)),
                    what="bringing rollout servers up",
                )
            except PeerError as error:
                logger.warning("synchronizing the rollout servers failed", extra={"facts": {"why": error}})
                await asyncio.sleep(0.2)
                self._syncing = False
                self._sync_wanted.set()
                continue
            self._post(lambda: self._synchronized(reply.push))  # noqa: B023 - posted before the next turn

    def _num_crews(self, servers: int) -> int:
        return -(-max(servers, 1) // (self._crew_size or max(servers, 1)))

    def _address(self, member: Member) -> protos.RolloutAddress:
        newest = max(self.book.pushed_version, self._joined_version)  # a push may have died with its trainer
        current = member.has_version and member.policy_version >= newest
        return protos.RolloutAddress(
            name=member.name,
            address=member.address,
            needs_version=not current,
            policy_version=member.policy_version,
            capabilities=member.identity.capabilities,
        )

    def _synchronized(self, push: protos.PushReport) -> None:
        self.ready, self._syncing = True, False
        self._on_push(push)

    def _ended(self, link: TrainerLink, reason: str) -> None:
        if self.link is link:
            self._on_end(link.name, reason)

    # Batches.

    async def pump(self) -> None:
        """Form what can be formed, make it durable, send it."""
        if self._push_was_lost():
            self.want_sync()
        formed = False
        while len(self.book.batches) < BATCHES_AHEAD and (groups := self._next_groups()):
            batch = self.book.record(self.book.recorded_step + 1, groups)
            self.filtering.recorded()
            self._unsent.append(batch.step)
            formed = True
        if formed:
            await self.ledger.durable()
            fault("conductor", "batch.recorded", step=self.book.recorded_step)
        self._send()

    def _send(self) -> None:
        if self.link is None or not self.ready:
            return
        while self._unsent:
            step = self._unsent[0]
            batch = self.book.batches.get(step)
            if batch is not None and not self._may_send(step):
                return
            del self._unsent[0]
            if batch is None:  # trained meanwhile: an earlier stream had sent it
                continue
            if len(batch.trajectories) != len(batch.keys):
                raise AssertionError(f"the payloads of step {step} were pruned before a checkpoint passed it")
            message = protos.TrajectoryBatch(
                step=step,
                incarnation=self._incarnation,
                trajectories=batch.trajectories,
                replay=step <= self._replay_until,
            )
            self.link.send(protos.TrainRequest(batch=message))
            if self.sharing.on:
                self._idle.clear()

    def _may_send(self, step: int) -> bool:
        return not self.sharing.on or (not self._syncing and self.sharing.may_train(step))

    def _push_was_lost(self) -> bool:
        """With time sharing all waits for the report of a push; one that was told to a broken stream is asked for."""
        told = not self._idle.is_set() or self._syncing
        return self.ready and self.sharing.trains and not self.book.batches and not told

    def _next_groups(self) -> list[Group]:
        """The oldest complete groups that the next step may train on; empty while there are too few.

        With dynamic sampling groups are looked at as they come, so that others begin in their place at once.
        """
        step = self.book.recorded_step + 1
        too_few = len(self.book.complete) < self.rules.prompts_per_step and not self.rules.dynamic_sampling
        if step > self.rules.num_steps or too_few:
            return []
        chosen: list[Group] = []
        for position in sorted(self.book.complete):
            group = self.book.groups[position]
            reason = self._unfit(group, step)
            if reason:
                self.book.drop_group(group, reason)
            else:
                chosen.append(group)
            if len(chosen) == self.rules.prompts_per_step:
                return chosen
        return []

    def _unfit(self, group: Group, step: int) -> str:
        nothing_to_compare_with = self.book.with_baseline and group.baseline() is None
        if len(group.drawn()) < self.rules.min_group_samples or nothing_to_compare_with:
            return "invalid"
        staleness = step - 1 - group.oldest_version()
        if staleness > self.rules.max_staleness and self.rules.staleness_policy == "drop":
            return "stale"
        return "filtered" if self.filtering.drops(group) else ""

    # Replies.

    def _replied(self, link: TrainerLink, reply: protos.TrainReply) -> None:
        if self.link is not link:
            return
        if reply.HasField("report"):
            batch = self.book.batches.get(reply.report.step)
            if batch is not None and self.book.train(reply.report.step):
                self._on_report(reply.report, batch)
            if reply.report.stop_reason:  # also of a step that was counted before the conductor died
                self._on_stop(reply.report)
        if reply.HasField("push"):
            if not reply.push.waiting:
                self._idle.set()
            self._on_push(reply.push)
        if reply.HasField("checkpoint"):
            self._on_checkpoint(reply.checkpoint)
        if not reply.ListFields():
            self._count_unreported()

    def _count_unreported(self) -> None:
        """Steps that are in the trainer's weights and that it has no report of: that died with a process."""
        for step in [step for step in self.book.batches if step <= self._joined_version]:
            self.book.train(step)

    async def save(self, *, deadline_seconds: float) -> protos.CheckpointReport:
        """Ask for a checkpoint of where the trainer stands."""
        assert self.link is not None
        stub = protos.TrainerStub(self.link.channel)
        what = "saving the last checkpoint"
        reply = await call(stub.Save, protos.SaveRequest(), deadline_seconds=deadline_seconds, what=what)
        return reply.checkpoint
