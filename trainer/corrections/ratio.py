"""The ratio of proximal to behaviour policy per token, and its effective sample size. B samples, R response tokens."""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped to +- this before exp."""


def log_ratio(logprobs_BR: Tensor, base_logprobs_BR: Tensor) -> Tensor:
    """Difference of two logprobs per token, clamped to +-20, [B, R]."""
    return (logprobs_BR - base_logprobs_BR).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@torch.no_grad()
def truncated_weights(old_logprobs_BR: Tensor, behaviour_logprobs_BR: Tensor, *, cap: float | None) -> Tensor:
    """min(exp(old - behaviour), cap) per token, constant [B, R]: truncated importance sampling (TIS).

    `cap` None leaves the weight as it is. Lower variance than the plain weight, at the price of a bias wherever the cap
    binds.
    """
    weights_BR = log_ratio(old_logprobs_BR, behaviour_logprobs_BR).exp()
    return weights_BR if cap is None else weights_BR.clamp(max=cap)


def effective_sample_share(*, mean: float, mean_square: float) -> float:
    """ESS as a share of the tokens: 1 / mean((w / mean w)^2); 1 when all weights are equal, 0 when there are none."""
    return mean * mean / mean_square if mean_square > 0 else 0.0
