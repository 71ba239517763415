"""Clipped PPO with dual clip (arXiv 1707.06347, 1912.09729). Dimensions: B samples, R response tokens."""

import torch
from torch import Tensor

from trainer.corrections import log_ratio
from trainer.losses.aggregate import aggregate
from trainer.losses.diagnostics import clip_metrics, ratio_metrics
from trainer.losses.types import LossInputs, LossOptions, LossOutputs
from trainer.metrics import Metric, token_mean


def vanilla(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and where A < 0 at most -A * dual; r = exp(logprobs - old).

    Blind to the behaviour policy unless `old_logprobs_BR` are its logprobs. Uses clip_low, clip_high, clip_dual,
    aggregation, loss_scale_factor.
    """
    loss_BR, metrics = clipped_surrogate(inputs, options)
    return policy_loss(loss_BR, inputs, options, metrics)


def clipped_surrogate(inputs: LossInputs, options: LossOptions) -> tuple[Tensor, dict[str, Metric]]:
    """Per-token loss [B, R] of clipped PPO, and its clip fractions and ratios."""
    advantages_BR = inputs.advantages_BR
    ratio_BR = log_ratio(inputs.logprobs_BR, inputs.old_logprobs_BR).exp()
    free_BR = -advantages_BR * ratio_BR
    clipped_BR = -advantages_BR * ratio_BR.clamp(1 - options.clip_low, 1 + options.clip_high)
    single_BR = torch.maximum(free_BR, clipped_BR)
    bound_BR = -advantages_BR * options.clip_dual
    negative_BR = advantages_BR < 0
    loss_BR = torch.where(negative_BR, torch.minimum(bound_BR, single_BR), single_BR)
    metrics = clip_metrics(clipped_BR > free_BR, inputs) | ratio_metrics(inputs)
    metrics["clip_fraction_dual"] = token_mean((single_BR > bound_BR) & negative_BR, inputs.mask_BR)
    return loss_BR, metrics


def policy_loss(loss_BR: Tensor, inputs: LossInputs, options: LossOptions, metrics: dict[str, Metric]) -> LossOutputs:
    """Aggregates a per-token policy loss, times the correction's weights, and reports it as `policy_loss`."""
    loss = aggregate(
        loss_BR if inputs.weights_BR is None else loss_BR * inputs.weights_BR,
        inputs.mask_BR,
        mode=options.aggregation,
        denominators=inputs.denominators,
        scale_factor=options.loss_scale_factor,
    )
    return LossOutputs(loss=loss, metrics={"policy_loss": Metric(loss.detach(), "sum"), **metrics})
