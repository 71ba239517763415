"""What a trainer rank does, the same on each of them: load, train, pack, stream, save.

rank 0: service -> an order to the others, and its own part        the others: services/ranks/rank.py
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import protos
from protos.arrays import from_array
from services.compose import load_json
from services.config import Config
from services.errors import OffbeatError
from trainer.checkpoints.failure import CheckpointFailed

if TYPE_CHECKING:
    from trainer.batch import Trajectory
    from trainer.parallel.orders import Orders

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a step came to."""

    metrics: dict[str, float]
    mismatches: Sequence[protos.ServerMismatch]
    skipped_updates: Sequence[protos.SkippedUpdate]
    alarms: Sequence[protos.Alarm]
    stop_reason: str
    """Why no further step may be made; empty where one may."""


class TrainerWork:
    """One rank's part of the trainer; blocking, for a compute thread. Rank 0 tells the others before it begins."""

    def __init__(self, config: Config, folder: Path, orders: Orders) -> None:
        self.config = config
        self.folder = folder
        self.orders = orders
        self.step = 0
        """Of the weights that the learner holds."""

    def load(self) -> None:
        """Join the other ranks, load and shard the model, go back to the newest whole checkpoint, pack.

        OffbeatError where config, model, ranks and checkpoint do not fit together: a fresh process would not help.
        """
        self._tell("load", json.dumps([self.config.model_dump(mode="json"), str(self.folder)]).encode())
        try:
            self._load()
        except (ValueError, OSError, CheckpointFailed) as error:
            logger.debug("the trainer cannot be loaded", exc_info=True)
            raise OffbeatError(str(error) or type(error).__name__) from error

    def _load(self) -> None:
        from services.pushes.dtypes import check_sent
        from services.pushes.reach import reach_of_device
        from trainer.checkpoints.restore import restore
        from trainer.checkpoints.store import CheckpointStore

        check_sent(self.config)
        self._make_learner()
        folder, config = self.folder / "checkpoints", self.config.trainer.checkpoint
        self.store = CheckpointStore(folder, config, incarnation=os.getpid(), ranks=self.learner.ranks)
        found, problems = self.store.latest_verified()
        for problem in problems:
            logger.error("a checkpoint is damaged", extra={"facts": {"problem": problem}})
        if found is not None:
            restored = restore(found, self.learner)
            self.step = restored.policy_version
            self.learner.guards.restore(restored.extra.get("guards", {}))
            logger.info("resumed", extra={"facts": {"step": self.step, "path": found}})
        self._make_outgoing()
        self.outgoing.pack()
        self.learner.rest()
        if self.learner.ranks.leads:
            self.outgoing.conclude()
        else:
            self.outgoing.follow()
        self.reach = reach_of_device(self.outgoing.device, streamed=self.outgoing.streamed)

    def _make_learner(self) -> None:
        from trainer.critic.model import load_critic
        from trainer.parallel.loading import load_trained
        from trainer.step import Learner

        config = self.config.trainer
        model, ranks, device = load_trained(config, store=self.orders.group_store())
        self.learner = Learner(model, config, ranks, critic=load_critic(config, device=str(device)))

    def _make_outgoing(self) -> None:
        import torch

        from trainer.adapters.push import outgoing_of

        push = self.config.push
        self.outgoing = outgoing_of(
            self.learner.model,
            self.config.trainer.lora,
            bucket_bytes=int(push.bucket_mib * 2**20),
            dtype=None if push.dtype == "auto" else getattr(torch, push.dtype),
            streamed=push.memory == "streamed",
        )

    def train(self, batch: protos.TrajectoryBatch) -> Trained:
        """One step; ValueError where the batch lacks what the algorithm needs."""
        self._tell("train", batch.SerializeToString() if self.orders.size > 1 else b"")
        trajectories = [from_wire(trajectory) for trajectory in batch.trajectories]
        metrics = self.learner.train(trajectories, step=batch.step, policy_version=batch.step - 1)
        self.step = batch.step
        return Trained(
            metrics=metrics,
            mismatches=[
                protos.ServerMismatch(
                    server=one.server, staleness=one.staleness, num_tokens=one.num_tokens, mean=one.mean
                )
                for one in self.learner.mismatches
            ],
            skipped_updates=[
                protos.SkippedUpdate(samples=skip.samples, suspects=skip.suspects, reason=skip.reason)
                for skip in self.learner.guards.skips
            ],
            alarms=[
                protos.Alarm(name=alarm.name, value=alarm.value, threshold=alarm.threshold)
                for alarm in self.learner.guards.alarms
            ],
            stop_reason=self.learner.guards.stop_reason,
        )

    def pack(self) -> None:
        """From here on the buckets stand for the weights: what need not stay on the device leaves before the push."""
        self._tell("pack")
        self.outgoing.pack()
        self.learner.rest()

    def stream(self) -> None:
        """Streamed weights are gathered while they are sent: the others take part until the push concludes."""
        self._tell("stream")
        if not self.learner.ranks.leads:
            self.outgoing.follow()

    def save(self) -> Future[Path]:
        """Copy the present state to the CPU; a thread of its own writes it. The future may fail by CheckpointFailed."""
        from trainer.checkpoints.snapshot import snapshot

        self._tell("save")
        try:
            self.store.ready()
        except CheckpointFailed as error:
            failed: Future[Path] = Future()
            failed.set_exception(error)
            return failed
        return self.store.begin(snapshot(self.learner, step=self.step, policy_version=self.step, extra=self._extra()))

    def _extra(self) -> dict[str, Any]:
        return {"guards": self.learner.guards.state()}

    def leave(self) -> None:
        """No further order will come; a checkpoint that is being written is finished."""
        import torch.distributed as dist

        self._tell("leave")
        self.store.finish()
        if dist.is_initialized():
            dist.destroy_process_group()

    def obey(self, name: str, payload: bytes) -> None:
        """An order of rank 0."""
        if name == "train":
            self.train(protos.TrajectoryBatch.FromString(payload))
        else:
            {"pack": self.pack, "stream": self.stream, "save": self._save_share, "leave": self.leave}[name]()

    def _save_share(self) -> None:
        def told(done: Future[Path]) -> None:
            if done.exception() is not None:
                logger.error("no checkpoint", extra={"facts": {"problem": str(done.exception())}})

        self.save().add_done_callback(told)

    def _tell(self, name: str, payload: bytes = b"") -> None:
        if self.orders.leads:
            self.orders.give(name, payload)


def ordered_work(payload: bytes, orders: Orders) -> TrainerWork:
    """The work that rank 0's first order describes."""
    config, folder = json.loads(payload)
    return TrainerWork(load_json(json.dumps(config)), Path(folder), orders)


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
        baseline=trajectory.baseline,
    )
