"""The behaviour policy as the old one, without a proximal policy between (verl's bypass mode). B samples, R tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from trainer.configs.correction import CorrectionConfig
from trainer.corrections import bounded, importance_weights, kept_by, normalized, statistic
from trainer.losses.diagnostics import ratio_metrics
from trainer.losses.ppo import policy_loss, vanilla
from trainer.losses.types import LossInputs, LossOptions, LossOutputs
from trainer.metrics import token_mean


def bypass(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """ppo_clip: `vanilla` with r = exp(logprobs - behaviour). reinforce: -A * logprobs * w, w = sg(r) as bounded.

    Rejection and weights follow the weights in training, so each update has its own; ppo_clip takes no w, its ratio is
    one. Rejected tokens leave the sum but not the denominators; a normalized w is divided by its mean over the
    micro-batch. Leaves out the second moment. Uses bypass_loss, correction, and for ppo_clip what `vanilla` uses.
    """
    kept_BR = _kept(inputs, options.correction)
    chosen = replace(inputs, old_logprobs_BR=inputs.behaviour_logprobs_BR, mask_BR=inputs.mask_BR * kept_BR)
    if options.bypass_loss == "ppo_clip":
        outputs = vanilla(chosen, options)
    else:
        outputs = _reinforce(replace(chosen, weights_BR=_weights(inputs, options.correction)), options)
    if options.correction.reject:
        outputs.metrics["rejected_token_share"] = token_mean(~kept_BR, inputs.mask_BR)
    return outputs


def _reinforce(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    metrics = ratio_metrics(inputs)
    if inputs.weights_BR is not None:
        metrics["importance_weight_mean"] = token_mean(inputs.weights_BR, inputs.mask_BR)
    return policy_loss(-inputs.advantages_BR * inputs.logprobs_BR, inputs, options, metrics)


@torch.no_grad()
def _weights(inputs: LossInputs, correction: CorrectionConfig) -> Tensor | None:
    if correction.weights == "none":
        return None
    logprobs_BR, behaviour_BR, mask_BR = inputs.logprobs_BR, inputs.behaviour_logprobs_BR, inputs.mask_BR
    plain_BR = importance_weights(logprobs_BR, behaviour_BR, mask_BR, level=correction.weights)
    weights_BR = bounded(plain_BR, bound=correction.bound, low=correction.weight_min, high=correction.weight_max)
    return normalized(weights_BR, mask_BR, level=correction.weights)[0] if correction.normalize else weights_BR


@torch.no_grad()
def _kept(inputs: LossInputs, correction: CorrectionConfig) -> Tensor:
    """Which tokens no rule rejects, bool [B, R]."""
    kept_BR = torch.ones_like(inputs.mask_BR, dtype=torch.bool)
    for rule in correction.reject:
        value = statistic(inputs.logprobs_BR, inputs.behaviour_logprobs_BR, inputs.mask_BR, name=rule.statistic)
        kept_BR = kept_BR & kept_by(value, name=rule.statistic, low=rule.low, high=rule.high)
    return kept_BR
