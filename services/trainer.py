"""The trainer service: recorded batches in, in order; a report, a pushed version and now and then a checkpoint out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

import protos
from services.actor import Result
from services.errors import OffbeatError
from services.faults import fault
from services.pushes.pushing import Pusher
from services.pushes.rolling import Rota, merged, roll
from services.ranks.work import Trained, TrainerWork
from services.streams import Outbox
from services.worker import Worker

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)
REPORTS_KEPT = 8
"""More than the batches that a conductor sends ahead."""


class TrainerService(Worker, protos.TrainerServicer):
    """Rank 0 of the trainer."""

    role = "trainer"

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        protos.add_TrainerServicer_to_server(self, server)
        return ("offbeat.v1.Trainer",)

    # Life.

    async def prepare(self) -> None:
        self.policy_version = 0
        self._batches: asyncio.Queue[protos.TrajectoryBatch] = asyncio.Queue()
        self._outbox: Outbox[protos.TrainReply] = Outbox()
        self._reports: deque[protos.StepReport] = deque(maxlen=REPORTS_KEPT)
        self._pushing = asyncio.Lock()
        self._push_task: asyncio.Task[None] | None = None
        self._save_task: asyncio.Task[protos.CheckpointReport] | None = None
        self._saving = asyncio.Lock()
        self._pusher: Pusher | None = None
        self._rota = Rota(self.config.crew_size)
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails as a push fails of itself, not of a rollout server."""
        await self.load(self._load)

    def _load(self) -> None:
        from trainer.checkpoints.due import Due
        from trainer.model.load import model_fingerprint
        from trainer.parallel.orders import Orders
        from trainer.parallel.start import seat

        self.identity.model_hash = model_fingerprint(self.config.trainer.model)
        self.part = TrainerWork(self.config, self.folder, Orders(seat()))
        self.part.load()
        self.policy_version = self.part.step
        self._due = Due(self.config.trainer.checkpoint)

    def state(self) -> protos.JoinRequest:
        return protos.JoinRequest(policy_version=self.policy_version)

    def in_hand(self) -> int:
        return self._batches.qsize()

    async def finish(self) -> None:
        """Let the push and the checkpoint under way end."""
        for task in (self._push_task, self._save_task):
            if task is not None:
                await asyncio.gather(task, return_exceptions=True)
        if self._pusher is not None:
            await self._pusher.set_members([])
        async with self._still():
            await self.compute(self.part.leave)

    # Training.

    async def Train(
        self, request_iterator: AsyncIterator[protos.TrainRequest], context: Any
    ) -> AsyncIterator[protos.TrainReply]:
        """The newest stream gets every reply, also of a step that an older stream has asked for."""
        outbox = self._outbox = Outbox()
        for report in self._reports:  # a conductor that came back may have missed them; it counts each step once
            outbox.put(protos.TrainReply(report=report))
        outbox.put(protos.TrainReply())
        while not self._batches.empty():  # a new stream sends again what the old one had sent
            self._batches.get_nowait()
        async for reply in outbox.replies(self._read(request_iterator)):
            yield reply

    async def _read(self, request_iterator: AsyncIterator[protos.TrainRequest]) -> None:
        async for request in request_iterator:
            self._batches.put_nowait(request.batch)

    async def serve(self) -> None:
        """Step after step, as batches come; raises what a push has failed by."""
        while True:
            waited_from = time.monotonic()
            batch = await self._next_batch()
            if batch.step <= self.policy_version:
                logger.info("batch was trained before", extra={"facts": {"step": batch.step}})
                continue
            if batch.step != self.policy_version + 1 or batch.incarnation != self.membership.incarnation:
                raise OffbeatError(
                    f"batch {batch.step} for incarnation {batch.incarnation} came to incarnation"
                    f" {self.membership.incarnation} at version {self.policy_version}"
                )
            await self._step(batch, waited=time.monotonic() - waited_from)

    async def _next_batch(self) -> protos.TrajectoryBatch:
        coming = asyncio.create_task(self._batches.get())
        first: set[asyncio.Future[Any]] = {coming, self._broken}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
            return coming.result()
        finally:
            coming.cancel()

    async def _step(self, batch: protos.TrajectoryBatch, *, waited: float) -> None:
        trained, seconds = await self._advance(batch)
        pushes = [report async for report in self._push(batch.step)] if self.part.outgoing.streamed else []
        report = protos.StepReport(
            step=batch.step,
            policy_version=self.policy_version,
            incarnation=batch.incarnation,
            metrics=trained.metrics,
            mismatches=trained.mismatches,
            skipped_updates=trained.skipped_updates,
            alarms=trained.alarms,
            stop_reason=trained.stop_reason,
            step_seconds=seconds,
            wait_seconds=waited,
            replay=batch.replay,
            weights_hash=self.part.outgoing.hash(),
        )
        self._reports.append(report)
        self._outbox.put(protos.TrainReply(report=report))
        fault(self.name, "step.reported", step=batch.step)
        if trained.stop_reason:
            logger.error("no further step: the conductor ends the run", extra={"facts": {"why": trained.stop_reason}})
            await self.draining.wait()
        for push in pushes:
            self._outbox.put(protos.TrainReply(push=push))
        if not self.part.outgoing.streamed:
            self._push_task = self._beside(self._push_and_tell(batch.step), name=f"push-{batch.step}")
        await self._save_if_due(batch.step)

    async def _advance(self, batch: protos.TrajectoryBatch) -> tuple[Trained, float]:
        """Train and pack: what it came to, and the seconds of the step."""
        async with self._still():
            began = time.monotonic()
            trained = await self.compute(self.part.train, batch)
            seconds = time.monotonic() - began
            fault(self.name, "step.computed", step=batch.step)
            async with nullcontext() if self.part.outgoing.streamed else self._pushing:
                await self.compute(self.part.pack)
                self.policy_version = batch.step
        return trained, seconds

    def _still(self) -> AbstractAsyncContextManager[None]:
        """Inside, no streamed push reads the weights. Buckets that stand apart may be sent meanwhile."""
        return self._pushing if self.part.outgoing.streamed else nullcontext()

    # Pushes.

    def _beside(self, work: Coroutine[Any, Any, Result], *, name: str) -> asyncio.Task[Result]:
        """A task whose failure ends the service: nobody else waits for it."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._look_at)
        return task

    def _look_at(self, done: asyncio.Task[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _push_and_tell(self, version: int) -> None:
        async for report in self._push(version):
            self._outbox.put(protos.TrainReply(push=report))

    async def _push(self, version: int) -> AsyncIterator[protos.PushReport]:
        """A report for each crew."""
        async with self._pushing:
            pusher = await self._ready_pusher()
            reports = roll(
                pusher,
                self._rota,
                version,
                names=pusher.lacking(version),
                transport=self.config.push.transport,
                superseded=lambda oldest: self._is_overtaken(version, oldest),
            )
            async for report in reports:
                fault(self.name, "push.crew" if report.waiting else "push.done", step=version)
                yield report

    def _is_overtaken(self, version: int, oldest: int) -> bool:
        """A newer version waits for the buckets, and those that this one has not reached may lag behind that one."""
        return self.part.step > version and self.part.step - oldest <= self.config.push.max_version_skew

    async def SyncRollouts(self, request: protos.SyncRolloutsRequest, context: Any) -> protos.SyncRolloutsReply:
        """Servers that came in between get the current version in a group of their own.

        Once begun it goes on, also where the caller gives up: with streamed weights the other ranks are in it.
        """
        await self._pushing.acquire()
        return await asyncio.shield(self._beside(self._sync(request), name="sync"))

    async def _sync(self, request: protos.SyncRolloutsRequest) -> protos.SyncRolloutsReply:
        try:
            pusher = await self._ready_pusher()
            await pusher.set_members(request.servers)
            version = self.policy_version
            behind = {one.name for one in request.servers if one.needs_version or one.policy_version < version}
            names = sorted(behind.intersection(pusher.lacking(version)))
            reports = roll(pusher, self._rota, version, names=names, transport=self.config.push.transport)
            return protos.SyncRolloutsReply(push=merged([report async for report in reports]))
        finally:
            self._pushing.release()

    async def _ready_pusher(self) -> Pusher:
        """For one push. Made with the first one: it needs the incarnation, which the conductor gives at the join."""
        if self.part.outgoing.streamed:
            await self.compute(self.part.stream)
        if self._pusher is None or self._pusher.incarnation != self.membership.incarnation:
            from trainer.pushes.weights import Broadcaster

            push = self.config.push
            self._pusher = Pusher(
                self.part.outgoing,
                Broadcaster(host=push.host, incarnation=self.membership.incarnation, device=self.part.outgoing.device),
                name=self.name,
                deadline_seconds=push.deadline_seconds,
                update_mode=self.config.rollout.update_mode,
                folder=self.folder / "weights",
                reach=self.part.reach,
            )
        return self._pusher

    # Checkpoints.

    async def _save_if_due(self, step: int) -> None:
        if self._due.after(step):
            (await self._save()).add_done_callback(self._saved)

    def _saved(self, done: asyncio.Task[protos.CheckpointReport]) -> None:
        if not done.cancelled():
            self._outbox.put(protos.TrainReply(checkpoint=done.result()))

    async def _save(self) -> asyncio.Task[protos.CheckpointReport]:
        """Copy the state now, write it on another thread: one write at a time, and one for a step."""
        async with self._saving:
            if self._save_task is not None:
                report = await asyncio.shield(self._save_task)  # a caller that gives up stops nothing
                if report.path and report.step == self.part.step:
                    return self._save_task
            async with self._still():
                fault(self.name, "checkpoint.write", step=self.part.step)
                self._due.saved()
                step, writing = await self.compute(lambda: (self.part.step, self.part.save()))
            self._save_task = asyncio.create_task(self._written(step, writing), name=f"save-{step}")
            return self._save_task

    async def _written(self, step: int, writing: Future[Path]) -> protos.CheckpointReport:
        from trainer.checkpoints.failure import CheckpointFailed

        report = protos.CheckpointReport(step=step)
        try:
            path = await asyncio.wrap_future(writing)
        except CheckpointFailed as error:
            report.problem = str(error)
            return report
        report.path = resolved(path)
        report.oldest_step = self.part.store.oldest()
        return report

    async def Save(self, request: protos.SaveRequest, context: Any) -> protos.SaveReply:
        return protos.SaveReply(checkpoint=await asyncio.shield(await self._save()))

    async def Export(self, request: protos.ExportRequest, context: Any) -> protos.ExportReply:
        """Save, and name the checkpoint: of one rank a Hugging Face folder; of several `offbeat export` makes one."""
        report = await asyncio.shield(await self._save())
        if report.problem:
            await context.abort(grpc.StatusCode.INTERNAL, report.problem)
        return protos.ExportReply(path=report.path)

    async def Status(self, request: protos.TrainerStatusRequest, context: Any) -> protos.TrainerStatusReply:
        return protos.TrainerStatusReply(
            policy_version=self.policy_version,
            incarnation=self.membership.incarnation,
            weights_hash=self.part.outgoing.hash(),
        )


def resolved(path: Path) -> str:
    return str(path.resolve())
