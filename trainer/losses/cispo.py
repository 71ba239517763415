"""Clipped importance sampling, CISPO (MiniMax-M1, arXiv 2506.13585). Dimensions: B samples, R response tokens."""

from trainer.corrections import log_ratio
from trainer.losses.diagnostics import clip_metrics, ratio_metrics
from trainer.losses.ppo import policy_loss
from trainer.losses.types import LossInputs, LossOptions, LossOutputs


def cispo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """-sg(clip(r, 1 - low, 1 + high)) * A * logprobs.

    The clip bounds a constant weight, so no token loses its gradient. Its value is no measure of progress. Leaves out
    the paper's token mask and KL. Uses clip_low (1: not clipped below, as in the paper), clip_high.
    """
    ratio_BR = log_ratio(inputs.logprobs_BR, inputs.old_logprobs_BR).exp().detach()
    weights_BR = ratio_BR.clamp(1 - options.clip_low, 1 + options.clip_high)
    metrics = clip_metrics(weights_BR != ratio_BR, inputs) | ratio_metrics(inputs)
    return policy_loss(-weights_BR * inputs.advantages_BR * inputs.logprobs_BR, inputs, options, metrics)
