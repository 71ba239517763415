"""What the run tells: events.jsonl, metrics.jsonl, quarantine.jsonl, the summary, and whoever watches."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import protos
from services.evaluation.occasions import Result, numbers
from services.records.book import Batch, Book, Group, Sample
from services.stages.health import means
from services.telemetry import JsonLines

if TYPE_CHECKING:
    from services.config import Config

logger = logging.getLogger(__name__)
RECENT_EVENTS = 500
WARNINGS = ("lost", "evicted", "warning", "quarantined", "skipped", "stopped")
"""Kinds of events that are logged as such."""
SHOWN = ("reward_mean", "loss", "kl", "grad_norm", "staleness_mean")


class Journalist:
    """Writes and tells; nobody waits for it, and a slow watcher loses events, counted."""

    def __init__(self, folder: Path, book: Book, config: Config) -> None:
        self.folder = folder
        self.book = book
        self.config = config
        self.last_metrics: dict[str, float] = {}
        self.checkpoints = {"written": 0, "failed": 0}
        self.num_steps = self.num_samples = self.num_pushes = self.missed_events = 0
        self._started: float | None = None
        self._last_report = 0.0
        self._busy_before = time.process_time()
        self._events = JsonLines(folder / "events.jsonl")
        self._metrics = JsonLines(folder / "metrics.jsonl")
        self._quarantine = JsonLines(folder / "quarantine.jsonl")
        self._evals = JsonLines(folder / "evals.jsonl")
        self._recent: deque[protos.TelemetryEvent] = deque(maxlen=RECENT_EVENTS)
        self._watchers: set[asyncio.Queue[protos.TelemetryEvent]] = set()

    def start_clock(self) -> None:
        """The run proper begins with the first lease; what came before is start-up."""
        if self._started is None:
            self._started = time.monotonic()
            self._busy_before = time.process_time()

    def seconds(self) -> float:
        return 0.0 if self._started is None else time.monotonic() - self._started

    def tell(self, kind: str, service: str, message: str, **facts: Any) -> None:
        """One event for the file, the log and the watchers."""
        labels = {key: str(value) for key, value in facts.items()}
        level = logging.WARNING if kind in WARNINGS else logging.INFO
        logger.log(level, "%s %s", service, message, extra={"facts": labels})
        self._publish(protos.TelemetryEvent(kind=kind, service=service, message=message, labels=labels))

    def step(self, report: protos.StepReport, batch: Batch) -> None:
        """A step is trained."""
        busy = time.process_time()
        samples = sum(not self.book.is_baseline(index) for _, index in batch.keys)
        metrics = {
            **report.metrics,
            "step": float(report.step),
            "step_seconds": report.step_seconds,
            "wait_seconds": report.wait_seconds,
            "num_samples": float(samples),
            "conductor_cpu_seconds": busy - self._busy_before,
            "run_seconds": self.seconds(),
        }
        if self.config.run.dynamic_sampling:
            metrics["dropped_filtered"] = float(self.book.dropped["filtered"])
        for server, (mean, num_tokens) in means(report.mismatches).items():
            metrics[f"logprob_diff_mean/{server}"] = mean
            metrics[f"logprob_diff_tokens/{server}"] = float(num_tokens)
        self._busy_before = busy
        self.num_steps += 1
        self.num_samples += samples
        self.last_metrics = metrics
        rounded = {key: float(f"{value:.6g}") if math.isfinite(value) else None for key, value in metrics.items()}
        extra = {"weights_hash": report.weights_hash} if report.weights_hash else {}
        self._metrics.write({"replay": report.replay, **extra, **rounded})
        if report.step % self.config.run.log_every == 0:
            logger.info("step", extra={"facts": {"step": report.step, **shown(metrics)}})
        self._publish(protos.TelemetryEvent(kind="step", service="trainer", message="step", values=metrics))
        self._guarded(report)

    def _guarded(self, report: protos.StepReport) -> None:
        """What the trainer's guards have found in a step."""
        for skip in report.skipped_updates:
            keys = {"samples": ",".join(skip.samples), "suspects": ",".join(skip.suspects)}
            self.tell("skipped", "trainer", "an update was left out", step=report.step, why=skip.reason, **keys)
        for alarm in report.alarms:
            facts = {"alarm": alarm.name, "value": f"{alarm.value:.6g}", "threshold": f"{alarm.threshold:.6g}"}
            self.tell("warning", "trainer", "a figure is out of bounds", step=report.step, **facts)

    def push(self, push: protos.PushReport) -> None:
        """A version has reached the rollout servers, or a crew of them."""
        self.num_pushes += not push.waiting
        values = {
            "policy_version": float(push.policy_version),
            "seconds": push.seconds,
            "begin_seconds": push.begin_seconds,
            "transfer_seconds": push.transfer_seconds,
            "stall_seconds": push.stall_seconds,
            "num_bytes": float(push.num_bytes),
        }
        labels = {"committed": ",".join(push.committed), "failed": ",".join(push.failed), "transport": push.transport}
        if push.waiting:
            labels["waiting"] = ",".join(push.waiting)
        event = protos.TelemetryEvent(kind="push", service="trainer", message="pushed", values=values, labels=labels)
        self._publish(event)

    def evaluation(self, result: Result) -> None:
        """An evaluation has ended; see services/evaluation/sheet.py."""
        self._evals.write(result)
        failed = sum(result["failures"].values())
        facts = {name: f"{value:.4g}" for name, value in numbers(result).items() if name != "time"}
        level = logging.WARNING if failed else logging.INFO
        logger.log(level, "evaluation", extra={"facts": {**facts, "failures": result["failures"]}})
        values = {**numbers(result), "failures": float(failed)}
        self._publish(protos.TelemetryEvent(kind="evaluation", service="conductor", message="evaluated", values=values))

    def checkpoint(self, report: protos.CheckpointReport) -> None:
        self.checkpoints["failed" if report.problem else "written"] += 1
        if report.problem:
            self.tell("warning", "trainer", "a checkpoint failed", step=report.step, why=report.problem)
        else:
            self.tell("checkpoint", "trainer", "checkpoint verified", step=report.step, path=report.path)

    def quarantine(self, sample: Sample, group: Group, reason: str) -> None:
        """Put a sample aside with all that is needed to see why."""
        response = sample.trajectory.response_text if sample.trajectory is not None else None
        record = {
            "group": sample.group,
            "index": sample.index,
            "prompt_id": group.prompt.prompt_id,
            "prompt": group.prompt.text or [message.content for message in group.prompt.messages],
            "response": response,
            "attempts": sample.attempts,
            "score_attempts": sample.score_attempts,
            "reason": reason,
        }
        self._quarantine.write(record)
        self.tell("quarantined", "conductor", "a sample was put aside", sample=sample.key, why=reason)

    def summarize(
        self, status: protos.ConductorStatusReply, *, num_tokens: int, evaluation: Result | None, stopped: str
    ) -> dict[str, Any]:
        """Write summary.json: what the run came to, and why where a guard has stopped it."""
        seconds, ledger = self.seconds(), status.ledger
        summary = {
            "run_id": status.run_id,
            **({"stopped": stopped} if stopped else {}),
            "steps": status.step,
            "samples": ledger.trained,
            "pushes": self.num_pushes,
            "checkpoints": self.checkpoints,
            "run_seconds": round(seconds, 3),
            "samples_per_s": round(self.num_samples / seconds, 1) if seconds else 0.0,
            "tokens_per_s": round(num_tokens / seconds, 1) if seconds else 0.0,
            "staleness": {str(age): count for age, count in sorted(status.staleness.items())},
            "ledger": {
                "accepted": ledger.accepted,
                "trained": ledger.trained,
                "dropped": dict(ledger.dropped),
                "quarantined": ledger.quarantined,
                "in_flight": ledger.in_flight,
                "refused": dict(ledger.refused),
                "balanced": ledger.balanced,
            },
            **({} if evaluation is None else {"evaluation": evaluation}),
        }
        scratch = self.folder / "summary.json.tmp"
        scratch.write_text(json.dumps(summary, indent=2) + "\n")
        os.replace(scratch, self.folder / "summary.json")
        return summary

    @contextmanager
    def watched_by(self, queue: asyncio.Queue[protos.TelemetryEvent], *, from_start: bool) -> Iterator[None]:
        """Tell `queue` everything from now on (and the recent past)."""
        for event in self._recent if from_start else ():
            queue.put_nowait(event)
        self._watchers.add(queue)
        try:
            yield
        finally:
            self._watchers.discard(queue)

    def close(self) -> None:
        for file in (self._events, self._metrics, self._quarantine, self._evals):
            file.close()

    def _publish(self, event: protos.TelemetryEvent) -> None:
        event.unix_seconds = time.time()
        self._recent.append(event)
        if event.kind != "step":
            record = {"time": round(event.unix_seconds, 3), "kind": event.kind, "service": event.service}
            self._events.write({**record, "message": event.message, **dict(event.values), **dict(event.labels)})
        for queue in self._watchers:
            if queue.full():
                self.missed_events += 1
            else:
                queue.put_nowait(event)


def shown(metrics: dict[str, float]) -> dict[str, str]:
    return {name: f"{metrics[name]:.4g}" for name in SHOWN if name in metrics}
