"""ReMax (arXiv 2310.10505): the baseline of a prompt is the reward of its greedy response."""

from trainer.advantages.optimal_token_baseline import counted_returns
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def remax(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A_t = G_t - baseline on counted tokens; G_t is the sum of counted rewards from t on. Uses no option.

    A token that does not count has G_t, as in verl; no loss looks at it. Raises ValueError without baselines.
    """
    if inputs.baseline_B is None:
        raise ValueError("remax compares with the reward of a greedy sample of each prompt, and none came")
    returns_BR = counted_returns(inputs)
    advantages_BR = returns_BR - inputs.baseline_B.to(returns_BR)[:, None] * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=returns_BR)
