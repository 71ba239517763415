"""Sums, extremes and deviations over the samples of one prompt, handed to each of them.

Dimensions: B samples, G groups. Samples need not be sorted by group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


class Groups:
    """Which samples belong together; values may have further dimensions behind B."""

    def __init__(self, group_B: Tensor) -> None:
        self._number_B: Tensor
        groups_G, self._number_B = torch.unique(group_B, return_inverse=True)
        self._count = len(groups_G)

    def sum(self, values_B: Tensor) -> Tensor:
        """Sum over the sample's group, for each sample."""
        zeros_G = values_B.new_zeros((self._count, *values_B.shape[1:]))
        return zeros_G.index_add(0, self._number_B, values_B)[self._number_B]

    def lowest(self, values_B: Tensor) -> Tensor:
        """Smallest value [B] of the sample's group, for each sample."""
        zeros_G = values_B.new_zeros(self._count)
        return zeros_G.scatter_reduce(0, self._number_B, values_B, "amin", include_self=False)[self._number_B]

    def highest(self, values_B: Tensor) -> Tensor:
        """Largest value [B] of the sample's group, for each sample."""
        return -self.lowest(-values_B)

    def leaders(self, values_B: Tensor) -> tuple[Tensor, Tensor]:
        """Which samples alone hold their group's largest value, bool [B], and the largest of the others' values, [B].

        The second is -inf in a group of equal values and in a group of one.
        """
        top_B = values_B == self.highest(values_B)
        runner_up_B = self.highest(values_B.masked_fill(top_B, -torch.inf))
        return top_B & (self.sum(top_B.to(values_B.dtype)) == 1), runner_up_B


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDeviations:
    """Each sample against its group, as [B] tensors."""

    size_B: Tensor
    deviation_B: Tensor
    """Score minus the mean of the group."""
    std_B: Tensor
    """Unbiased standard deviation of the group; 0 for a group of one."""

    def from_mean(self, scores_B: Tensor) -> Tensor:
        """Score minus the mean of the group, where a group of one has mean 0."""
        return torch.where(self.size_B == 1, scores_B, self.deviation_B)


def group_deviations(scores_B: Tensor, group_B: Tensor) -> GroupDeviations:
    """Deviation from the group's mean, exactly zero in a group of equal scores.

    Scores are shifted by the group's smallest before they are summed: else the rounding of a mean of equal scores,
    divided by a standard deviation that is rounding too, would come out as a sizeable advantage.
    """
    groups = Groups(group_B)
    size_B = groups.sum(torch.ones_like(scores_B))
    shifted_B = scores_B - groups.lowest(scores_B)
    deviation_B = shifted_B - groups.sum(shifted_B) / size_B
    std_B = (groups.sum(deviation_B.square()) / (size_B - 1).clamp(min=1)).sqrt()
    return GroupDeviations(size_B=size_B, deviation_B=deviation_B, std_B=std_B)
