"""Parts of the reward by name, as the reward room broke it down. B samples, K parts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.batch import Trajectory
from trainer.metrics import StepMetrics


def reward_parts(trajectories: Sequence[Trajectory], names: Sequence[str]) -> Tensor:
    """The named parts of each sample, float32 [B, K]; ValueError names a sample that lacks one or has no number."""
    parts_BK = torch.tensor([[_part(one, name) for name in names] for one in trajectories], dtype=torch.float32)
    bad = (~parts_BK.isfinite()).nonzero().tolist()
    if bad:
        row, column = bad[0]
        raise ValueError(f"trajectory {trajectories[row].sample}: part {names[column]!r} of the reward is not finite")
    return parts_BK


def part_metrics(parts_BK: Tensor, names: Sequence[str]) -> StepMetrics:
    """Mean of each part over the samples."""
    return {f"reward_mean/{name}": mean for name, mean in zip(names, parts_BK.mean(0).tolist(), strict=True)}


def _part(trajectory: Trajectory, name: str) -> float:
    if name not in trajectory.reward_parts:
        existing = ", ".join(sorted(trajectory.reward_parts)) or "no breakdown at all"
        raise ValueError(
            f"trajectory {trajectory.sample}: gdpo_weights asks for part {name!r} of the reward, which has: {existing}"
        )
    return trajectory.reward_parts[name]
