"""Group sequence policy optimization, GSPO (arXiv 2507.18071). Dimensions: B samples, R response tokens."""

import torch

from trainer.losses.diagnostics import clip_metrics, ratio_metrics
from trainer.losses.ppo import policy_loss
from trainer.losses.types import LossInputs, LossOptions, LossOutputs

LOG_RATIO_BOUND = 10.0


def gspo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """max(-A s, -A clip(s, 1 - low, 1 + high)) with one ratio s = exp(mean_t(logprobs - old)) for a whole sample.

    In the gradient each token stands for itself: s_t = exp(min(lp - sg(lp) + sg(mean_t(lp - old)), 10)). Clip ranges
    are far narrower than those of PPO, 3e-4 and 4e-4 in the paper. Aggregates by the configured mode (the paper:
    seq-mean-token-mean). Leaves out the dual clip and the token variant. Uses clip_low, clip_high.
    """
    logprobs_BR, mask_BR = inputs.logprobs_BR, inputs.mask_BR
    log_ratio_BR = (logprobs_BR - inputs.old_logprobs_BR).detach() * mask_BR
    mean_B1 = log_ratio_BR.sum(-1, keepdim=True) / mask_BR.sum(-1, keepdim=True).clamp(min=1)
    ratio_BR = (logprobs_BR - logprobs_BR.detach() + mean_B1).clamp(max=LOG_RATIO_BOUND).exp()
    free_BR = -inputs.advantages_BR * ratio_BR
    clipped_BR = -inputs.advantages_BR * ratio_BR.clamp(1 - options.clip_low, 1 + options.clip_high)
    metrics = clip_metrics(clipped_BR > free_BR, inputs) | ratio_metrics(inputs)
    return policy_loss(torch.maximum(free_BR, clipped_BR), inputs, options, metrics)
