"""One rank's part of a supervised run: the newest checkpoint, then step after step, figures and checkpoints.

Every rank reads the same rows and takes the same steps; rank 0 alone writes what people read.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from services.errors import ConfigError, OffbeatError, RunStopped
from services.supervised.config import SftConfig
from services.supervised.rows import SftRows
from services.telemetry import JsonLines
from trainer.checkpoints.due import Due
from trainer.checkpoints.failure import CheckpointFailed
from trainer.checkpoints.restore import restore
from trainer.checkpoints.snapshot import snapshot
from trainer.checkpoints.store import CheckpointStore
from trainer.guarding.guards import named
from trainer.metrics import StepMetrics
from trainer.supervised.step import SupervisedLearner

logger = logging.getLogger(__name__)


class SftRun:
    """From the newest checkpoint to the last step."""

    def __init__(self, config: SftConfig, folder: Path, learner: SupervisedLearner, rows: SftRows) -> None:
        self.config = config
        self.folder = folder
        self.learner = learner
        self.rows = rows
        self.step = self.position = 0
        self.last: StepMetrics = {}
        self.num_steps = config.sft.steps(len(rows.stream))
        self._saving: tuple[int, Future[Path]] | None = None
        """The newest checkpoint that was begun, and its step."""
        self._due = Due(config.trainer.checkpoint)
        self._store = CheckpointStore(
            folder / "checkpoints", config.trainer.checkpoint, incarnation=os.getpid(), ranks=learner.ranks
        )

    def resume(self) -> None:
        """Go back to the newest whole checkpoint, where there is one.

        ConfigError where it has seen other rows, OffbeatError where all steps are made already.
        """
        found, _ = self._store.latest_verified()
        if found is not None:
            self._restore(found)
        if self.step >= self.num_steps:
            raise OffbeatError(f"{self.folder} holds a finished run: choose another run.name, more steps, or --fresh")
        if self.learner.ranks.leads:
            keep_until(self.folder / "metrics.jsonl", self.step)

    def _restore(self, found: Path) -> None:
        restored = restore(found, self.learner)
        if restored.extra.get("rows") != self.rows.fingerprint:
            raise ConfigError([f"{self.folder}: its checkpoints are of other rows; choose another run.name or --fresh"])
        self.step = restored.step
        self.position = restored.extra["position"]
        self.learner.guards.restore(restored.extra["guards"])
        logger.info("resumed", extra={"facts": {"step": self.step, "path": found}})

    def run(self, stopping: Callable[[], bool]) -> StepMetrics:
        """All steps that are left and the last checkpoint; gives the newest figures.

        RunStopped where a guard has ended the run; OffbeatError where it was asked to stop (its state is saved), or
        where the last checkpoint cannot be written.
        """
        metrics = JsonLines(self.folder / "metrics.jsonl") if self.learner.ranks.leads else None
        while self.step < self.num_steps:
            self._step(metrics)
            reason = self.learner.guards.stop_reason
            if reason:
                raise RunStopped(reason)
            save, stop = self._agreed(self._due.after(self.step), stopping())
            last = stop or self.step == self.num_steps
            if save or last:
                self._save(last=last)
            if stop and self.step < self.num_steps:
                self._wait_for_checkpoint()
                raise OffbeatError(f"stopped after step {self.step}; the same command goes on in {self.folder}")
        self._wait_for_checkpoint()
        return self.last

    def _step(self, metrics: JsonLines | None) -> None:
        began, sft = time.monotonic(), self.config.sft
        found = self.learner.learn(self.rows.at(self.position, sft.batch_size))
        seconds = time.monotonic() - began
        self.step += 1
        self.position += sft.batch_size
        found |= {"step_seconds": seconds, "tokens_per_second": found["tokens"] / seconds}
        found["epoch"] = self.position / len(self.rows.stream)
        if self.rows.held_out and (self.step % sft.evaluate_every == 0 or self.step == self.num_steps):
            found |= self.learner.judge(self.rows.held_out)
        self.last = {"step": float(self.step)} | found
        self._warn()
        if metrics is not None:
            metrics.write({key: value if math.isfinite(value) else None for key, value in self.last.items()})
            self._tell()

    def _warn(self) -> None:
        for skip in self.learner.guards.skips:
            logger.warning("an update was left out", extra={"facts": {"reason": skip.reason, "rows": named(skip)}})
        for alarm in self.learner.guards.alarms:
            facts = {"alarm": alarm.name, "value": f"{alarm.value:.4g}", "threshold": alarm.threshold}
            logger.warning("a figure is out of bounds", extra={"facts": facts})

    def _tell(self) -> None:
        if self.step % self.config.sft.log_every and self.step != self.num_steps and "held_out_loss" not in self.last:
            return
        shown = ("loss", "lr", "grad_norm", "tokens_per_second", "held_out_loss", "held_out_token_accuracy")
        facts = {key: f"{self.last[key]:.4g}" for key in shown if key in self.last}
        logger.info("step %d/%d", self.step, self.num_steps, extra={"facts": facts})

    def _agreed(self, save: bool, stop: bool) -> tuple[bool, bool]:
        """Clocks and signals differ between ranks: rank 0's clock counts, and anybody's signal."""
        ranks = self.learner.ranks
        asked = torch.tensor([float(save and ranks.leads), float(stop)])
        ranks.max_(asked)
        return bool(asked[0]), bool(asked[1])

    def _save(self, *, last: bool) -> None:
        """A thread of its own writes it; a failed one is told, and tried again when the next is due.

        One that is due while the one before is still being written is left out; the last one waits for it.
        """
        self._due.saved()
        if last:
            self._store.finish(self.config.trainer.checkpoint.deadline_seconds)
        try:
            self._store.ready()
        except CheckpointFailed as error:
            logger.error("no checkpoint", extra={"facts": {"problem": error}})
            return
        taken = snapshot(self.learner, step=self.step, policy_version=self.step, extra=self._extra())
        self._saving = self.step, self._store.begin(taken)
        self._saving[1].add_done_callback(tell_failure)

    def _wait_for_checkpoint(self) -> None:
        """Until what is being written is there; OffbeatError where the present state is not saved."""
        self._store.finish(self.config.trainer.checkpoint.deadline_seconds)
        step, saving = self._saving or (0, None)
        if saving is None or step != self.step or not saving.done() or saving.exception() is not None:
            raise OffbeatError(f"the checkpoint of step {self.step} was not written; the log in {self.folder} says why")

    def _extra(self) -> dict[str, Any]:
        guards = self.learner.guards.state()
        return {"position": self.position, "rows": self.rows.fingerprint, "guards": guards}

    def write_summary(self) -> dict[str, Any]:
        """What the run came to, in the run folder."""
        shown = ("loss", "held_out_loss", "held_out_token_accuracy")
        summary: dict[str, Any] = {
            "steps": self.step,
            "rows": len(self.rows.stream),
            **{key: self.last[key] for key in shown if key in self.last},
            "checkpoint": str(self.folder / "checkpoints" / f"step_{self.step}"),
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary


def tell_failure(done: Future[Path]) -> None:
    if done.exception() is not None:
        logger.error("no checkpoint", extra={"facts": {"problem": done.exception()}})


def keep_until(path: Path, step: int) -> None:
    """Drops the rows of steps that will be made again, and what a crash has left of a line."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(kept), encoding="utf-8")
    fresh.replace(path)
