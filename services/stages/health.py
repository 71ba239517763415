"""Whether the rollout servers can be believed: their logprobs beside the trainer's, server by server, step by step.

Samples that the trainer's own version made are compared exactly. In older ones the policy's movement is part of the
difference. It is the same for every server whose samples are as old, so there only what a server has above the best
server of the same step counts; a server with none beside it is then not judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import protos
from services.records.book import Batch
from services.roster import Roster


@dataclass(frozen=True, slots=True)
class Figure:
    """What is held against one server in one step."""

    nats: float
    num_tokens: int
    basis: str
    """What the difference is measured against, for the reader of a log."""

    def __str__(self) -> str:
        return f"{self.nats:.4g} nats a token over {self.num_tokens} tokens, {self.basis}"


EXACT = "on the trainer's own version"
RELATIVE = "above the best server of the step on samples as old"


class Health:
    """Counts for each server process the steps in a row in which its mismatch was over the limit."""

    def __init__(self, roster: Roster, *, limit: float | None, patience: int) -> None:
        self.roster = roster
        self.limit = limit
        self.patience = patience
        self._strikes: Counter[str] = Counter()
        """By process id."""
        self._judged_step = 0

    def judge(self, report: protos.StepReport, batch: Batch) -> dict[str, str]:
        """Note the figures of a step; returns the servers that have to go, with the reason.

        A step that comes again after a restart of the trainer says nothing new.
        """
        if report.step <= self._judged_step:
            return {}
        self._judged_step = report.step
        for name, (mean, _) in means(report.mismatches).items():
            if name in self.roster.members:
                self.roster.members[name].logprob_diff_mean = mean
        if self.limit is None:
            return {}
        return self._guilty(figures(report.mismatches), first_leases(batch))

    def _guilty(self, found: dict[str, Figure], first_lease: dict[str, int]) -> dict[str, str]:
        assert self.limit is not None
        guilty = {}
        for name, figure in found.items():
            member = self.roster.members.get(name)
            if member is None or member.evicted or first_lease.get(name, 0) < member.first_lease:
                continue  # it is gone, or these are samples of the process before it
            strikes = self._strikes[member.process_id] + 1 if figure.nats > self.limit else 0
            self._strikes[member.process_id] = strikes
            if strikes >= self.patience:
                guilty[name] = (
                    f"logprob mismatch over {self.limit:g} nats a token in {strikes} steps in a row; last: {figure}"
                )
        return guilty


def first_leases(batch: Batch) -> dict[str, int]:
    """Server -> the oldest lease under which it made a sample of the batch."""
    found: dict[str, int] = {}
    for trajectory in batch.trajectories:
        found[trajectory.server] = min(found.get(trajectory.server, trajectory.lease_id), trajectory.lease_id)
    return found


def means(cells: Iterable[protos.ServerMismatch]) -> dict[str, tuple[float, int]]:
    """Server -> (mean, tokens): over its samples of the trainer's own version where it has any, else over all."""
    by_server: dict[str, list[protos.ServerMismatch]] = {}
    for cell in cells:
        by_server.setdefault(cell.server, []).append(cell)
    fresh = {name: [cell for cell in own if cell.staleness == 0] for name, own in by_server.items()}
    return {
        name: mean([(cell.mean, cell.num_tokens) for cell in fresh[name] or own]) for name, own in by_server.items()
    }


def figures(cells: Sequence[protos.ServerMismatch]) -> dict[str, Figure]:
    """What can be held against each server; one that cannot be judged by this step is left out."""
    finite = [cell for cell in cells if math.isfinite(cell.mean)]
    found = {}
    for name in sorted({cell.server for cell in finite}):
        own = [cell for cell in finite if cell.server == name]
        fresh = [(cell.mean, cell.num_tokens) for cell in own if cell.staleness == 0]
        above = [(cell.mean - best, cell.num_tokens) for cell in own if (best := best_beside(cell, finite)) is not None]
        if fresh:
            found[name] = Figure(*mean(fresh), EXACT)
        elif above:
            found[name] = Figure(*mean(above), RELATIVE)
    return found


def best_beside(cell: protos.ServerMismatch, cells: Sequence[protos.ServerMismatch]) -> float | None:
    """The lowest mean of all servers on samples as old; None where no other server has any."""
    same_age = [other for other in cells if other.staleness == cell.staleness]
    return min(other.mean for other in same_age) if len(same_age) > 1 else None


def mean(parts: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """(weighted mean, total weight) of (value, weight) pairs."""
    total = sum(weight for _, weight in parts)
    return sum(value * weight for value, weight in parts) / max(total, 1), total
