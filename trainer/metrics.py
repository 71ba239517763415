"""Figures of a training step: how parts from micro-batches add up, and what the batch alone can tell.

A `Metric` stays on its device until the step ends, so that no micro-batch waits for a copy to the host.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.batch import Trajectory
from trainer.parallel import ALONE, Ranks

StepMetrics: TypeAlias = dict[str, float]


class Metric(NamedTuple):
    """A scalar tensor and how it joins with those of other micro-batches and updates."""

    value: Tensor
    reduce: Literal["sum", "token_mean", "max"]
    """sum: parts of an update's total. token_mean: a sum over counted tokens, divided by their number at the end."""


def token_mean(values_BR: Tensor, mask_BR: Tensor) -> Metric:
    """Mean over the tokens that count, of values [B, R]; not differentiable."""
    return Metric((values_BR * mask_BR).sum(), "token_mean")


class Tally:
    """Adds up the metrics of micro-batches, and those of all ranks in `result`."""

    def __init__(self) -> None:
        self._values: dict[str, Metric] = {}
        self._tokens = 0.0

    def add(self, metrics: Mapping[str, Metric], *, tokens: float) -> None:
        """Joins one micro-batch with `tokens` counted tokens."""
        self._tokens += tokens
        for name, (value, reduce) in metrics.items():
            if name in self._values:
                before = self._values[name].value
                value = torch.maximum(before, value) if reduce == "max" else before + value
            self._values[name] = Metric(value, reduce)

    def result(self, ranks: Ranks = ALONE, *, updates: int) -> StepMetrics:
        """Every metric as a float; totals are means over the `updates` that they were added up over.

        All ranks call it and get the same; one that had no micro-batch adds nothing.
        """
        found = ranks.gather({"tokens": self._tokens, "values": self._on_host()})
        tokens = max(sum(part["tokens"] for part in found), 1.0)
        divisors = {"sum": float(updates), "token_mean": tokens, "max": 1.0}
        joined: dict[str, list[float]] = {}
        reduces: dict[str, str] = {}
        for part in found:
            for name, (value, reduce) in part["values"].items():
                joined.setdefault(name, []).append(value)
                reduces[name] = reduce
        return {
            name: (max(values) if reduces[name] == "max" else sum(values)) / divisors[reduces[name]]
            for name, values in joined.items()
        }

    def _on_host(self) -> dict[str, tuple[float, str]]:
        """One copy for all."""
        if not self._values:
            return {}
        host = torch.stack([metric.value.double() for metric in self._values.values()]).tolist()
        return {name: (value, metric.reduce) for (name, metric), value in zip(self._values.items(), host, strict=True)}


def absolute_differences(parts_N: Sequence[Tensor]) -> StepMetrics:
    """Mean, 99th percentile (nearest rank) and maximum of |behaviour - trainer| logprobs, nats."""
    if not parts_N:
        return {}
    difference_N = torch.cat(list(parts_N))
    rank = max(1, -(-99 * len(difference_N) // 100))
    mean, p99, top = torch.stack(
        [difference_N.mean(), difference_N.kthvalue(rank).values, difference_N.amax()]
    ).tolist()
    return {"logprob_diff_mean": mean, "logprob_diff_p99": p99, "logprob_diff_max": top}


def batch_metrics(trajectories: Sequence[Trajectory], *, policy_version: int) -> StepMetrics:
    """Rewards, lengths, truncation and staleness (in policy versions) of a batch that is not empty."""
    rewards = np.array([t.reward for t in trajectories])
    lengths = np.array([len(t.response_ids) for t in trajectories])
    staleness = np.array([policy_version - min(version for version, _ in t.spans) for t in trajectories])
    values, counts = np.unique(staleness, return_counts=True)
    return {
        "samples": float(len(trajectories)),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "groups_equal_reward_share": _equal_reward_share(np.array([t.group for t in trajectories]), rewards),
        "response_length_mean": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "truncation_rate": float(np.mean([t.stop_reason == "length" for t in trajectories])),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        **{f"staleness_count_{value}": float(count) for value, count in zip(values, counts, strict=True)},
    }


def _equal_reward_share(groups: npt.NDArray[np.int64], rewards: npt.NDArray[np.float64]) -> float:
    order = np.argsort(groups, kind="stable")
    _, starts = np.unique(groups[order], return_index=True)
    low, high = (extreme.reduceat(rewards[order], starts) for extreme in (np.minimum, np.maximum))
    return float(np.mean(low == high))
