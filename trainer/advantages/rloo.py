"""REINFORCE leave-one-out (arXiv 2402.14740): the baseline is the mean of the group's other samples."""

import torch

from trainer.advantages.groups import group_deviations
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A = n / (n - 1) * (R - mean_g) on every counted token; a group of one has A = R; returns = A.

    Uses no option.
    """
    scores_B = inputs.token_rewards_BR.sum(-1)
    group = group_deviations(scores_B, inputs.group_B)
    scaled_B = group.deviation_B * group.size_B / (group.size_B - 1).clamp(min=1)
    advantages_B = torch.where(group.size_B == 1, scores_B, scaled_B)
    advantages_BR = advantages_B[:, None] * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)
