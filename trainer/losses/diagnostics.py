"""Figures that every policy loss reports about its ratios. Dimensions: B samples, R response tokens."""

import torch
from torch import Tensor

from trainer.corrections import log_ratio
from trainer.losses.types import LossInputs
from trainer.metrics import Metric, token_mean


@torch.no_grad()
def ratio_metrics(inputs: LossInputs) -> dict[str, Metric]:
    """Mean and maximum of the token ratio exp(logprobs - old), and its mean negative log."""
    log_ratio_BR = log_ratio(inputs.logprobs_BR, inputs.old_logprobs_BR)
    ratio_BR = log_ratio_BR.exp()
    return {
        "ratio_mean": token_mean(ratio_BR, inputs.mask_BR),
        "ratio_max": Metric((ratio_BR * inputs.mask_BR).amax(), "max"),
        "ppo_kl": token_mean(-log_ratio_BR, inputs.mask_BR),
    }


@torch.no_grad()
def clip_metrics(is_clipped_BR: Tensor, inputs: LossInputs) -> dict[str, Metric]:
    """Shares of clipped tokens [B, R] bool: low where the advantage is negative, high elsewhere."""
    negative_BR = inputs.advantages_BR < 0
    return {
        "clip_fraction_low": token_mean(is_clipped_BR & negative_BR, inputs.mask_BR),
        "clip_fraction_high": token_mean(is_clipped_BR & ~negative_BR, inputs.mask_BR),
    }
