"""Importance weights of a token, a sequence or its geometric mean, bounded and normalized. B samples, R tokens.

TIS truncates: https://fengyao.notion.site/off-policy-rl; IcePop masks: https://ringtech.notion.site/icepop.
"""

import torch
from torch import Tensor

from trainer.corrections.ratio import LOG_RATIO_BOUND

EPSILON = 1e-8


@torch.no_grad()
def importance_weights(old_BR: Tensor, behaviour_BR: Tensor, mask_BR: Tensor, *, level: str) -> Tensor:
    """exp(clamp(x, +-20)) on every counted token, 0 elsewhere; constant [B, R]; d = old - behaviour logprobs.

    token: x = d. sequence: x = the sum of d over the sample's counted tokens, one weight for all of them. geometric:
    their mean. Raises ValueError on another level.
    """
    log_ratio_BR = (old_BR - behaviour_BR) * mask_BR
    match level:
        case "token":
            exponent_BR = log_ratio_BR
        case "sequence":
            exponent_BR = log_ratio_BR.sum(-1, keepdim=True)
        case "geometric":
            exponent_BR = log_ratio_BR.sum(-1, keepdim=True) / (mask_BR.sum(-1, keepdim=True) + EPSILON)
        case _:
            raise ValueError(f"unknown level of importance weights {level!r}")
    return exponent_BR.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() * mask_BR


def bounded(weights_BR: Tensor, *, bound: str, low: float | None, high: float | None) -> Tensor:
    """truncate: min(w, high), as it is with `high` None. mask: 0 outside [low, high]. ValueError on another bound."""
    match bound:
        case "truncate":
            return weights_BR if high is None else weights_BR.clamp(max=high)
        case "mask":
            inside_BR = (weights_BR >= (low or 0.0)) & (weights_BR <= (float("inf") if high is None else high))
            return torch.where(inside_BR, weights_BR, 0.0)
    raise ValueError(f"unknown bound of importance weights {bound!r}")


def normalized(weights_BR: Tensor, mask_BR: Tensor, *, level: str) -> tuple[Tensor, float]:
    """Weights over their mean, and that mean: over counted tokens, or over samples where a sample has one weight.

    Weights whose mean is below 1e-8 stay as they are.
    """
    if level == "token":
        mean = (weights_BR * mask_BR).sum() / (mask_BR.sum() + EPSILON)
    else:
        mean_B = (weights_BR * mask_BR).sum(-1) / (mask_BR.sum(-1) + EPSILON)
        mean = mean_B.sum() / mask_BR.any(-1).sum().clamp(min=1)
    value = float(mean)
    return (weights_BR / mean, value) if value > EPSILON else (weights_BR, 1.0)
