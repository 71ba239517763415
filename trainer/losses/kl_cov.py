"""KL-Cov: a KL penalty on the tokens of highest covariance (arXiv 2505.22617). B samples, R response tokens."""

import torch
from torch import Tensor

from trainer.losses.covariance import num_chosen, token_covariance
from trainer.losses.diagnostics import ratio_metrics
from trainer.losses.ppo import policy_loss
from trainer.losses.types import LossInputs, LossOptions, LossOutputs
from trainer.metrics import token_mean


def kl_cov(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """-A r, plus kl_cov_coef * |logprobs - old| on the max(1, int(share * N)) tokens of highest covariance.

    N and the covariance are of the micro-batch, so its split matters. The log ratio is not clamped. Leaves out every
    clip. Uses kl_cov_share, kl_cov_coef.
    """
    log_ratio_BR = inputs.logprobs_BR - inputs.old_logprobs_BR
    chosen_BR = _highest(inputs, options)
    loss_BR = -inputs.advantages_BR * log_ratio_BR.exp() + options.kl_cov_coef * log_ratio_BR.abs() * chosen_BR
    metrics = ratio_metrics(inputs)
    metrics["covariance_fraction"] = token_mean(chosen_BR, inputs.mask_BR)
    return policy_loss(loss_BR, inputs, options, metrics)


@torch.no_grad()
def _highest(inputs: LossInputs, options: LossOptions) -> Tensor:
    covariance_BR = token_covariance(inputs).masked_fill(inputs.mask_BR == 0, -torch.inf)
    top_N = covariance_BR.flatten().topk(num_chosen(inputs, share=options.kl_cov_share)).indices
    chosen_BR = torch.zeros_like(covariance_BR, dtype=torch.bool)
    chosen_BR.view(-1)[top_N] = True
    return chosen_BR
