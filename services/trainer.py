"""The trainer service: recorded batches in, in order; a report, a pushed version and now and then a checkpoint out."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

import protos
from protos.arrays import from_array
from services.errors import OffbeatError
from services.faults import fault
from services.pushing import Pusher
from services.rolling import Rota, merged, roll
from services.streams import Outbox
from services.worker import Worker

if TYPE_CHECKING:
    from trainer.batch import Trajectory
    from trainer.checkpoint import Snapshot

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
        self._computed_step = 0
        """What the learner's weights are: ahead of policy_version while a step ends. Set on the compute thread."""
        self._pusher: Pusher | None = None
        self._rota = Rota(self.config.crew_size)
        await self.load(self._load)

    def _load(self) -> None:
        import torch

        from services.reach import reach_of_device
        from trainer.checkpoint import CheckpointStore, restore
        from trainer.lora import attach_adapter
        from trainer.lora_push import outgoing_of
        from trainer.model import bound_memory, load_model, model_fingerprint, prepare_process
        from trainer.step import Learner

        config = self.config.trainer
        prepare_process(threads=config.threads, seed=config.seed)
        bound_memory(config.device, fraction=config.memory_fraction)
        model = load_model(
            config.model, dtype=config.dtype, attn_implementation=config.attn_implementation, device=config.device
        )
        if config.lora is not None:
            attach_adapter(model, config.lora, base_model=config.model)
        self.identity.model_hash = model_fingerprint(config.model)
        self.learner = Learner(model, config)
        self.store = CheckpointStore(self.folder / "checkpoints", config.checkpoint, incarnation=os.getpid())
        found, problems = self.store.latest_verified()
        for problem in problems:
            logger.error("a checkpoint is damaged", extra={"facts": {"problem": problem}})
        if found is not None:
            self.policy_version = self._computed_step = restore(found, self.learner).policy_version
            logger.info("resumed", extra={"facts": {"step": self.policy_version, "path": found}})
        push = self.config.push
        self.outgoing = outgoing_of(
            model,
            config.lora,
            bucket_bytes=int(push.bucket_mib * 2**20),
            dtype=None if push.dtype == "auto" else getattr(torch, push.dtype),
            streamed=push.memory == "streamed",
        )
        self._pack()
        self.outgoing.conclude()
        self.reach = reach_of_device(self.outgoing.device, streamed=self.outgoing.streamed)

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
        """Step after step, as batches come."""
        while True:
            waited_from = time.monotonic()
            batch = await self._batches.get()
            if batch.step <= self.policy_version:
                logger.info("batch was trained before", extra={"facts": {"step": batch.step}})
                continue
            if batch.step != self.policy_version + 1 or batch.incarnation != self.membership.incarnation:
                raise OffbeatError(
                    f"batch {batch.step} for incarnation {batch.incarnation} came to incarnation"
                    f" {self.membership.incarnation} at version {self.policy_version}"
                )
            await self._step(batch, waited=time.monotonic() - waited_from)

    async def _step(self, batch: protos.TrajectoryBatch, *, waited: float) -> None:
        metrics, mismatches, seconds = await self._advance(batch)
        pushes = [report async for report in self._push(batch.step)] if self.outgoing.streamed else []
        report = protos.StepReport(
            step=batch.step,
            policy_version=self.policy_version,
            incarnation=batch.incarnation,
            metrics=metrics,
            mismatches=mismatches,
            step_seconds=seconds,
            wait_seconds=waited,
            replay=batch.replay,
            weights_hash=self.outgoing.hash(),
        )
        self._reports.append(report)
        self._outbox.put(protos.TrainReply(report=report))
        fault(self.name, "step.reported", step=batch.step)
        for push in pushes:
            self._outbox.put(protos.TrainReply(push=push))
        if not self.outgoing.streamed:
            self._push_task = asyncio.create_task(self._push_and_tell(batch.step), name=f"push-{batch.step}")
        await self._save_if_due(batch.step)

    async def _advance(
        self, batch: protos.TrajectoryBatch
    ) -> tuple[dict[str, float], list[protos.ServerMismatch], float]:
        """Train and pack: metrics, mismatches, seconds of the step. A snapshot may be sent while the step runs; weights
        that are streamed may not change then."""
        free = nullcontext()
        while_training, while_packing = (self._pushing, free) if self.outgoing.streamed else (free, self._pushing)
        async with while_training:
            began = time.monotonic()
            metrics, mismatches = await self.compute(self._train, batch)
            seconds = time.monotonic() - began
            fault(self.name, "step.computed", step=batch.step)
            async with while_packing:
                await self.compute(self._pack)
                self.policy_version = batch.step
        return metrics, mismatches, seconds

    def _train(self, batch: protos.TrajectoryBatch) -> tuple[dict[str, float], list[protos.ServerMismatch]]:
        trajectories = [from_wire(trajectory) for trajectory in batch.trajectories]
        metrics = self.learner.train(trajectories, step=batch.step, policy_version=batch.step - 1)
        self._computed_step = batch.step
        return metrics, [
            protos.ServerMismatch(server=one.server, staleness=one.staleness, num_tokens=one.num_tokens, mean=one.mean)
            for one in self.learner.mismatches
        ]

    def _pack(self) -> None:
        """From here on the buckets stand for the weights: what need not stay on the device leaves before the push."""
        self.outgoing.pack()
        self.learner.rest()

    # Pushes.

    async def _push_and_tell(self, version: int) -> None:
        async for report in self._push(version):
            self._outbox.put(protos.TrainReply(push=report))

    async def _push(self, version: int) -> AsyncIterator[protos.PushReport]:
        """A report for each crew."""
        async with self._pushing:
            pusher = self._the_pusher()
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
        return self._computed_step > version and self._computed_step - oldest <= self.config.push.max_version_skew

    async def SyncRollouts(self, request: protos.SyncRolloutsRequest, context: Any) -> protos.SyncRolloutsReply:
        """Servers that came in between get the current version in a group of their own."""
        async with self._pushing:
            pusher = self._the_pusher()
            await pusher.set_members(request.servers)
            version = self.policy_version
            behind = {one.name for one in request.servers if one.needs_version or one.policy_version < version}
            names = sorted(behind.intersection(pusher.lacking(version)))
            reports = roll(pusher, self._rota, version, names=names, transport=self.config.push.transport)
            return protos.SyncRolloutsReply(push=merged([report async for report in reports]))

    def _the_pusher(self) -> Pusher:
        """Made with the first push: it needs the incarnation, which the conductor gives at the join."""
        if self._pusher is None or self._pusher.incarnation != self.membership.incarnation:
            from trainer.weights import Broadcaster

            push = self.config.push
            self._pusher = Pusher(
                self.outgoing,
                Broadcaster(host=push.host, incarnation=self.membership.incarnation, device=self.outgoing.device),
                name=self.name,
                deadline_seconds=push.deadline_seconds,
                update_mode=self.config.rollout.update_mode,
                folder=self.folder / "weights",
                reach=self.reach,
            )
        return self._pusher

    # Checkpoints.

    async def _save_if_due(self, step: int) -> None:
        every = self.config.trainer.checkpoint.every_steps
        if every and step % every == 0:
            (await self._save()).add_done_callback(self._saved)

    def _saved(self, done: asyncio.Task[protos.CheckpointReport]) -> None:
        if not done.cancelled():
            self._outbox.put(protos.TrainReply(checkpoint=done.result()))

    async def _save(self) -> asyncio.Task[protos.CheckpointReport]:
        """Copy the state now, write it on another thread: one write at a time, and one for a step."""
        async with self._saving:
            if self._save_task is not None:
                report = await self._save_task
                if report.path and report.step == self._computed_step:
                    return self._save_task
            taken = await self.compute(self._snapshot)
            self._save_task = asyncio.create_task(self._write(taken), name=f"save-{taken.step}")
            return self._save_task

    def _snapshot(self) -> Snapshot:
        from trainer.checkpoint import snapshot

        return snapshot(self.learner, step=self._computed_step, policy_version=self._computed_step)

    async def _write(self, taken: Snapshot) -> protos.CheckpointReport:
        from trainer.checkpoint import CheckpointFailed

        fault(self.name, "checkpoint.write", step=taken.step)
        report = protos.CheckpointReport(step=taken.step)
        try:
            path = await asyncio.to_thread(self.store.write, taken)
        except CheckpointFailed as error:
            report.problem = str(error)
            return report
        report.path = resolved(path)
        report.oldest_step = self.store.oldest()
        return report

    async def Save(self, request: protos.SaveRequest, context: Any) -> protos.SaveReply:
        return protos.SaveReply(checkpoint=await (await self._save()))

    async def Export(self, request: protos.ExportRequest, context: Any) -> protos.ExportReply:
        """A checkpoint is a Hugging Face folder already: export names the newest one."""
        report = await (await self._save())
        if report.problem:
            await context.abort(grpc.StatusCode.INTERNAL, report.problem)
        return protos.ExportReply(path=report.path)

    async def Status(self, request: protos.TrainerStatusRequest, context: Any) -> protos.TrainerStatusReply:
        return protos.TrainerStatusReply(
            policy_version=self.policy_version,
            incarnation=self.membership.incarnation,
            weights_hash=self.outgoing.hash(),
        )


def resolved(path: Path) -> str:
    return str(path.resolve())


def from_wire(trajectory: protos.Trajectory) -> Trajectory:
    """A trajectory as the trainer room sees it."""
    from trainer.batch import Trajectory

    return Trajectory(
        sample=f"{trajectory.key.group}/{trajectory.key.index}",
        group=trajectory.key.group,
        prompt_ids=from_array(trajectory.prompt_ids),
        response_ids=from_array(trajectory.response_ids),
        behaviour_logprobs=from_array(trajectory.behaviour_logprobs),
        loss_mask=from_array(trajectory.loss_mask) if trajectory.HasField("loss_mask") else None,
        reward=trajectory.reward,
        reward_parts=dict(trajectory.reward_breakdown),
        reference_logprobs=(
            from_array(trajectory.reference_logprobs) if trajectory.HasField("reference_logprobs") else None
        ),
        spans=tuple((span.policy_version, span.num_tokens) for span in trajectory.spans),
        stop_reason=protos.StopReason.Name(trajectory.stop_reason).removeprefix("STOP_REASON_").lower(),
        server=trajectory.server,
    )
