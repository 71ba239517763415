"""Optimal token baseline (OTB): at each place the group's mean return, weighted by the variance of the path so far.

Dimensions: B samples, R response tokens.
"""

import torch
from torch import Tensor

from trainer.advantages.groups import Groups
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs

EPSILON = 1e-8


def optimal_token_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A_t = G_t - b_t on counted tokens, b_t = sum_g(G_t W_t) / (sum_g(W_t) + 1e-8) over samples that count at t.

    W_t adds up w = 1 - 2 pi + sum pi^2 (the squared norm of the score at the logits), times the squared importance
    weight where there is one. b is 0 where only the longest sample of a group reaches, and in a group of one. Rewards
    on tokens that do not count are left out. The step computes pi and sum pi^2 anew, by one forward. Uses no option.
    """
    returns_BR = counted_returns(inputs)
    baseline_BR = _baseline(returns_BR, path_variance(inputs) * inputs.mask_BR, inputs)
    advantages_BR = (returns_BR - baseline_BR) * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=returns_BR)


def counted_returns(inputs: AdvantageInputs) -> Tensor:
    """G_t: sum of the rewards of counted tokens from t on, [B, R]."""
    return (inputs.token_rewards_BR * inputs.mask_BR).flip(-1).cumsum(-1).flip(-1)


def path_variance(inputs: AdvantageInputs) -> Tensor:
    """W_t, [B, R]; ValueError without logprobs and sums of squares."""
    if inputs.logprobs_BR is None or inputs.square_sums_BR is None:
        raise ValueError("an optimal token baseline needs logprobs and sums of squared probabilities")
    variance_BR = 1 - 2 * inputs.logprobs_BR.exp() + inputs.square_sums_BR
    if inputs.importance_weights_BR is not None:
        variance_BR = variance_BR * inputs.importance_weights_BR.square()
    return (variance_BR * inputs.mask_BR).cumsum(-1)


def _baseline(returns_BR: Tensor, weights_BR: Tensor, inputs: AdvantageInputs) -> Tensor:
    groups = Groups(inputs.group_B)
    baseline_BR = groups.sum(returns_BR * weights_BR) / (groups.sum(weights_BR) + EPSILON)
    longest_B, second_B = groups.leaders(inputs.mask_BR.sum(-1))
    place_R = torch.arange(returns_BR.shape[1])
    return baseline_BR.masked_fill(longest_B[:, None] & (place_R >= second_B[:, None]), 0.0)
