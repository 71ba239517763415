"""Pass@k advantages (arXiv 2503.19595): only the best sample of a group learns, by what it is ahead of the second."""

import torch

from trainer.advantages.groups import Groups, group_deviations
from trainer.advantages.grpo import EPSILON
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def grpo_passk(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A = (R_1 - R_2) / (std_g + 1e-6) on every counted token of the best sample, 0 elsewhere; returns = A.

    Two samples that are best together have R_1 = R_2, so nobody learns. With `norm_by_std` off the division is left
    out. k is the size of the group; the estimator over all subsets of k samples is left out. Raises ValueError on a
    group of one.
    """
    scores_B = inputs.token_rewards_BR.sum(-1)
    group = group_deviations(scores_B, inputs.group_B)
    if bool((group.size_B < 2).any()):
        raise ValueError("grpo_passk compares the best sample of a group with the second: a group of one has none")
    best_B, second_B = Groups(inputs.group_B).leaders(scores_B)
    advantages_B = torch.where(best_B, scores_B - second_B, 0.0)
    if options.norm_by_std:
        advantages_B = advantages_B / (group.std_B + EPSILON)
    advantages_BR = advantages_B[:, None] * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)
