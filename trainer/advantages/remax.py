"""ReMax (arXiv 2310.10505): the baseline of a prompt is the reward of its greedy response."""

from torch import Tensor

from trainer.advantages.optimal_token_baseline import counted_returns
from trainer.advantages.types import AdvantageInputs, AdvantageOutputs


def remax(inputs: AdvantageInputs, greedy_rewards_B: Tensor) -> AdvantageOutputs:
    """A_t = G_t - reward of the greedy response on counted tokens; G_t is the sum of counted rewards from t on.

    Not an estimator of the default loop: it needs a greedy sample of each prompt.
    """
    returns_BR = counted_returns(inputs)
    advantages_BR = returns_BR - greedy_rewards_B[:, None] * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=returns_BR)
