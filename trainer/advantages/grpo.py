"""Group-relative advantages: GRPO (arXiv 2402.03300), and Dr.GRPO (arXiv 2503.20783) without the division."""

import torch

from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs, group_deviations

EPSILON = 1e-6


def grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A = (R - mean_g) / (std_g + 1e-6) on every counted token; std unbiased; returns = A.

    A group of one has mean 0 and standard deviation 1. With `norm_by_std` off the division is left out (Dr.GRPO).
    """
    scores_B = inputs.token_rewards_BR.sum(-1)
    group = group_deviations(scores_B, inputs.group_B)
    alone_B = group.size_B == 1
    advantages_B = torch.where(alone_B, scores_B, group.deviation_B)
    if options.norm_by_std:
        advantages_B = advantages_B / (torch.where(alone_B, 1.0, group.std_B) + EPSILON)
    advantages_BR = advantages_B[:, None] * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)
