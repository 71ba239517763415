"""Rejection of tokens and samples whose behaviour policy is too far from the proximal one. B samples, R tokens.

d = old - behaviour logprobs of a token, clamped to +-20, so exp(d) is the importance ratio.
"""

import torch
from torch import Tensor

from trainer.corrections.ratio import log_ratio

EPSILON = 1e-8


@torch.no_grad()
def statistic(old_BR: Tensor, behaviour_BR: Tensor, mask_BR: Tensor, *, name: str) -> Tensor:
    """LEVEL_ESTIMATOR of each token, [B, R], or of each sample, [B, 1].

    k1: -d. k2: d^2 / 2. k3: e^d - 1 - d. token: of each; seq_sum, seq_mean, seq_max: over the sample's counted tokens,
    0 where it has none. Raises ValueError on another name.
    """
    level, _, estimator = name.rpartition("_")
    value_BR = _estimate(log_ratio(old_BR, behaviour_BR) * mask_BR, estimator)
    match level:
        case "token":
            return value_BR
        case "seq_sum":
            return value_BR.sum(-1, keepdim=True)
        case "seq_mean":
            return value_BR.sum(-1, keepdim=True) / (mask_BR.sum(-1, keepdim=True) + EPSILON)
        case "seq_max" if estimator != "k1":
            return value_BR.amax(-1, keepdim=True)
    raise ValueError(f"unknown statistic {name!r}")


def kept_by(statistic_BR: Tensor, *, name: str, low: float | None, high: float) -> Tensor:
    """Which tokens stay, bool of the statistic's shape: k1 in [log low, log high], k2 and k3 at most `high`.

    `low` None is 1 / high; only k1 reads it.
    """
    if not name.endswith("_k1"):
        return statistic_BR <= high
    lowest, highest = torch.tensor([1 / high if low is None else low, high], dtype=torch.float64).log().tolist()
    return (statistic_BR >= lowest) & (statistic_BR <= highest)


def _estimate(log_ratio_BR: Tensor, estimator: str) -> Tensor:
    match estimator:
        case "k1":
            return -log_ratio_BR
        case "k2":
            return 0.5 * log_ratio_BR.square()
        case "k3":
            return log_ratio_BR.exp() - 1 - log_ratio_BR
    raise ValueError(f"unknown estimator {estimator!r} of a statistic")
