"""Clip-Cov: no gradient for some tokens of high covariance (arXiv 2505.22617). B samples, R response tokens."""

import torch
from torch import Tensor

from trainer.losses.covariance import num_chosen, token_covariance
from trainer.losses.diagnostics import clip_metrics, ratio_metrics
from trainer.losses.ppo import policy_loss
from trainer.losses.types import LossInputs, LossOptions, LossOutputs
from trainer.metrics import token_mean


def clip_cov(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), times 0 for max(1, int(share * N)) tokens drawn at random.

    They are drawn by `inputs.generator` from those with bounds[0] < covariance < bounds[1] that the clip left alone; N
    and the covariance are of the micro-batch, so its split matters. The log ratio is not clamped. Leaves out the dual
    clip. Uses clip_low, clip_high, clip_cov_share, clip_cov_low, clip_cov_high.
    """
    ratio_BR = (inputs.logprobs_BR - inputs.old_logprobs_BR).exp()
    free_BR = -inputs.advantages_BR * ratio_BR
    clipped_BR = -inputs.advantages_BR * ratio_BR.clamp(1 - options.clip_low, 1 + options.clip_high)
    is_clipped_BR = clipped_BR > free_BR
    silent_BR = _draw(inputs, options, is_clipped_BR)
    metrics = clip_metrics(is_clipped_BR, inputs) | ratio_metrics(inputs)
    metrics["covariance_fraction"] = token_mean(silent_BR, inputs.mask_BR)
    return policy_loss(torch.maximum(free_BR, clipped_BR) * ~silent_BR, inputs, options, metrics)


@torch.no_grad()
def _draw(inputs: LossInputs, options: LossOptions, is_clipped_BR: Tensor) -> Tensor:
    covariance_BR = token_covariance(inputs)
    inside_BR = (covariance_BR > options.clip_cov_low) & (covariance_BR < options.clip_cov_high)
    slots_N = (inside_BR & ~is_clipped_BR & (inputs.mask_BR > 0)).flatten().nonzero().flatten()
    order_N = torch.randperm(len(slots_N), generator=inputs.generator).to(slots_N.device)
    silent_BR = torch.zeros_like(is_clipped_BR)
    silent_BR.view(-1)[slots_N[order_N[: num_chosen(inputs, share=options.clip_cov_share)]]] = True
    return silent_BR
