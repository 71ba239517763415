"""Divergence PPO with binary divergences, DPPO (arXiv 2602.04879). Dimensions: B samples, R response tokens."""

import torch
from torch import Tensor

from trainer.corrections import log_ratio
from trainer.losses.diagnostics import clip_metrics, ratio_metrics
from trainer.losses.ppo import policy_loss
from trainer.losses.types import LossInputs, LossOptions, LossOutputs
from trainer.metrics import token_mean

EPSILON = 1e-8


def dppo_tv(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """-A * sg(min(r, dual)) * logprobs where p - p_old <= high (A > 0) or >= -low (elsewhere), else 0.

    A trust region in probability: rare tokens, whose ratios jump, are not cut off. Here clip_low and clip_high bound
    the total variation and clip_dual the weight (the paper: 20, far above the default of 3). Leaves out the top-k
    divergences. Uses clip_low, clip_high, clip_dual.
    """
    moved_BR = (inputs.logprobs_BR.exp() - inputs.old_logprobs_BR.exp()).detach()
    inside_BR = torch.where(inputs.advantages_BR > 0, moved_BR <= options.clip_high, moved_BR >= -options.clip_low)
    return _truncated(inside_BR, inputs, options)


def dppo_kl(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """As `dppo_tv`, with the KL of the token against all others: KL(p_old || p) <= high or low, or moved back.

    Moved back: p <= p_old where A > 0, p >= p_old elsewhere. Uses clip_low, clip_high (in nats), clip_dual.
    """
    old_BR, new_BR = inputs.old_logprobs_BR.exp(), inputs.logprobs_BR.detach().exp()
    others_BR = (1 - old_BR) * ((1 - old_BR + EPSILON) / (1 - new_BR + EPSILON)).log()
    kl_BR = old_BR * (inputs.old_logprobs_BR - inputs.logprobs_BR.detach()) + others_BR
    up_BR = (kl_BR <= options.clip_high) | (new_BR <= old_BR)
    down_BR = (kl_BR <= options.clip_low) | (new_BR >= old_BR)
    return _truncated(torch.where(inputs.advantages_BR > 0, up_BR, down_BR), inputs, options)


def _truncated(inside_BR: Tensor, inputs: LossInputs, options: LossOptions) -> LossOutputs:
    ratio_BR = log_ratio(inputs.logprobs_BR, inputs.old_logprobs_BR).exp().detach()
    weights_BR = ratio_BR.clamp(max=options.clip_dual) * inside_BR
    metrics = clip_metrics(~inside_BR, inputs) | ratio_metrics(inputs)
    metrics["clip_fraction_dual"] = token_mean((ratio_BR > options.clip_dual) & inside_BR, inputs.mask_BR)
    return policy_loss(-inputs.advantages_BR * weights_BR * inputs.logprobs_BR, inputs, options, metrics)
