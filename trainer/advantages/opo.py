"""On-policy RL with optimal baseline (OPO, arXiv 2505.23585): longer samples weigh more in the group's mean."""

import torch

from trainer.advantages.groups import Groups
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def opo(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A = R - sum_g(len R) / sum_g(len) on every counted token, len in counted tokens; returns = A.

    A group of one has baseline 0. A group of equal rewards has advantage exactly 0. Uses no option; the paper's exact
    on-policy training is the run's affair.
    """
    groups = Groups(inputs.group_B)
    scores_B, lengths_B = inputs.token_rewards_BR.sum(-1), inputs.mask_BR.sum(-1)
    shifted_B = scores_B - groups.lowest(scores_B)
    deviation_B = shifted_B - groups.sum(lengths_B * shifted_B) / groups.sum(lengths_B).clamp(min=1)
    alone_B = groups.sum(torch.ones_like(scores_B)) == 1
    advantages_BR = torch.where(alone_B, scores_B, deviation_B)[:, None] * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)
