"""Geometric-mean policy optimization, GMPO (arXiv 2507.20673). Dimensions: B samples, R response tokens."""

import torch
from torch import Tensor

from trainer.losses.aggregate import EPSILON
from trainer.losses.diagnostics import clip_metrics, ratio_metrics
from trainer.losses.types import LossInputs, LossOptions, LossOutputs
from trainer.metrics import Metric

WEIGHT_EPSILON = 1e-10


def geo_mean(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Mean over all samples of -mean_t(A) * exp(mean_t(l)); l = logprobs - old, clipped per token.

    l stays within [-low, high] on the side to which sign(A) pulls, in logs and so wider than PPO at the same number
    (0.4 in the paper). A correction's weights join by their geometric mean. Samples without a counted token count in
    the mean; the configured aggregation does not. Leaves out advantages that differ within a sample: their mean is
    taken. Uses clip_low, clip_high.
    """
    log_ratio_BR = inputs.logprobs_BR - inputs.old_logprobs_BR
    bounded_BR = log_ratio_BR.clamp(-options.clip_low, options.clip_high)
    sign_BR = inputs.advantages_BR.sign()
    pulled_BR = sign_BR * torch.minimum(sign_BR * log_ratio_BR, sign_BR * bounded_BR)
    loss_B = -_sample_mean(inputs.advantages_BR, inputs.mask_BR) * _sample_mean(pulled_BR, inputs.mask_BR).exp()
    if inputs.weights_BR is not None:
        loss_B = loss_B * _sample_mean((inputs.weights_BR + WEIGHT_EPSILON).log(), inputs.mask_BR).exp()
    loss = loss_B.sum() / max(inputs.denominators.samples, 1.0)
    is_clipped_BR = (log_ratio_BR != bounded_BR) & (sign_BR != 0)
    metrics = clip_metrics(is_clipped_BR, inputs) | ratio_metrics(inputs)
    return LossOutputs(loss=loss, metrics={"policy_loss": Metric(loss.detach(), "sum"), **metrics})


def _sample_mean(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    return (values_BR * mask_BR).sum(-1) / (mask_BR.sum(-1) + EPSILON)
