"""Group-relative advantages: GRPO (arXiv 2402.03300), and Dr.GRPO (arXiv 2503.20783) without the division."""

import torch
from torch import Tensor

from trainer.advantages.groups import group_deviations
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs

EPSILON = 1e-6


def grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A = (R - mean_g) / (std_g + 1e-6) on every counted token; std unbiased; returns = A.

    A group of one has mean 0 and standard deviation 1. With `norm_by_std` off the division is left out (Dr.GRPO).
    """
    scores_B = inputs.token_rewards_BR.sum(-1)
    advantages_BR = relative(scores_B, inputs.group_B, norm_by_std=options.norm_by_std)[:, None] * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)


def relative(scores_B: Tensor, group_B: Tensor, *, norm_by_std: bool) -> Tensor:
    """GRPO's advantage of each sample, [B]."""
    group = group_deviations(scores_B, group_B)
    advantages_B = group.from_mean(scores_B)
    if norm_by_std:
        advantages_B = advantages_B / (torch.where(group.size_B == 1, 1.0, group.std_B) + EPSILON)
    return advantages_B
