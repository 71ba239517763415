"""Mean and whitening over the tokens that count. B samples, R response tokens."""

import torch
from torch import Tensor

EPSILON = 1e-8


def masked_mean(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Sum over counted tokens / (their number + 1e-8); what stands elsewhere may be anything, NaN too."""
    return torch.where(mask_BR > 0, values_BR, 0.0).sum() / (mask_BR.sum() + EPSILON)


def whiten(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) by the moments of counted tokens, variance unbiased; all tokens are moved.

    One counted token, or none, has variance 0.
    """
    centred_BR = values_BR - masked_mean(values_BR, mask_BR)
    tokens = mask_BR.sum()
    variance = masked_mean(centred_BR.square(), mask_BR) * tokens / (tokens - 1).clamp(min=1)
    return centred_BR * torch.rsqrt(variance + EPSILON)
