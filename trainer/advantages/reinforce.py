"""Plain REINFORCE (Williams, 1992): the undiscounted return, no baseline."""

from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def reinforce(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A_t = G_t = sum of the token rewards from t on, on every counted token; returns = A.

    Rewards on tokens that do not count (a reward may stand behind a tool's output) still reach the tokens before.
    Uses no option.
    """
    returns_BR = inputs.token_rewards_BR.flip(-1).cumsum(-1).flip(-1) * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=returns_BR, returns_BR=returns_BR)
