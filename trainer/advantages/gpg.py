"""Group policy gradient (GPG, arXiv 2504.02546): group-mean baseline, scaled up where samples have no reward."""

from trainer.advantages.groups import group_deviations
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def gpg(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A = alpha (R - mean_g) on every counted token, alpha = B / max(number of R that are not 0, 1); returns = A.

    A group of one has mean 0. Left out: the paper's division by F_norm (1 here) and its counting of informative groups
    instead of rewards. Reports alpha as `gpg_scale`. Uses no option.
    """
    scores_B = inputs.token_rewards_BR.sum(-1)
    scale = len(scores_B) / max(int(scores_B.count_nonzero()), 1)
    deviation_B = group_deviations(scores_B, inputs.group_B).from_mean(scores_B)
    advantages_BR = scale * deviation_B[:, None] * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR, metrics={"gpg_scale": scale})
