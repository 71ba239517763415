"""What an advantage estimator takes and gives, and the sums over a group that several of them share.

Dimensions: B samples, R response tokens, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """One whole batch, on the CPU; every estimator works in the dtype of `token_rewards_BR`."""

    token_rewards_BR: Tensor
    """Reward of each token; an outcome reward stands on the last response token, less the KL when that is a reward."""
    mask_BR: Tensor
    """1 where a response token counts."""
    group_B: Tensor
    """int64; samples of one prompt share a number, numbers need not be contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOptions:
    """Numbers that estimators read; each names those that it uses."""

    norm_by_std: bool = True
    """Divide by the group's standard deviation (grpo)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOutputs:
    """Advantages and returns per token, and the estimator's own figures."""

    advantages_BR: Tensor
    returns_BR: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


Estimator: TypeAlias = Callable[[AdvantageInputs, AdvantageOptions], AdvantageOutputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDeviations:
    """Each sample against its group, as [B] tensors."""

    size_B: Tensor
    deviation_B: Tensor
    """Score minus the mean of the group."""
    std_B: Tensor
    """Unbiased standard deviation of the group; 0 for a group of one."""


def group_deviations(scores_B: Tensor, group_B: Tensor) -> GroupDeviations:
    """Deviation from the group's mean, exactly zero in a group of equal scores.

    Scores are shifted by the group's smallest before they are summed: else the rounding of a mean of equal scores,
    divided by a standard deviation that is rounding too, would come out as a sizeable advantage.
    """
    groups_G, index_B = torch.unique(group_B, return_inverse=True)
    zeros_G = torch.zeros(len(groups_G), dtype=scores_B.dtype)
    size_B = zeros_G.index_add(0, index_B, torch.ones_like(scores_B))[index_B]
    lowest_B = zeros_G.scatter_reduce(0, index_B, scores_B, "amin", include_self=False)[index_B]
    shifted_B = scores_B - lowest_B
    deviation_B = shifted_B - zeros_G.index_add(0, index_B, shifted_B)[index_B] / size_B
    square_B = zeros_G.index_add(0, index_B, deviation_B.square())[index_B]
    std_B = (square_B / (size_B - 1).clamp(min=1)).sqrt()
    return GroupDeviations(size_B=size_B, deviation_B=deviation_B, std_B=std_B)
