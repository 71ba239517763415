"""REINFORCE++ with a group baseline (arXiv 2501.03262): group means taken off, then whitened over the whole batch."""

from trainer.advantages.groups import group_deviations
from trainer.advantages.moments import whiten
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A = whiten(R - mean_g) over counted tokens, 0 elsewhere; returns = A.

    A group of one has mean 0. Groups of equal rewards are not at zero where the mean over tokens is not: longer samples
    weigh more in it. No division by the group's standard deviation. Uses no option.
    """
    scores_B = inputs.token_rewards_BR.sum(-1)
    deviation_B = group_deviations(scores_B, inputs.group_B).from_mean(scores_B)
    advantages_BR = whiten(deviation_B[:, None] * inputs.mask_BR, inputs.mask_BR) * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)
