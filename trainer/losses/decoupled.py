"""Decoupled PPO (arXiv 2110.00641; asynchronous RL of LLMs: arXiv 2505.24298). B samples, R response tokens."""

from trainer.corrections import truncated_weights
from trainer.losses.ppo import clipped_surrogate, policy_loss
from trainer.losses.types import LossInputs, LossOptions, LossOutputs
from trainer.metrics import token_mean


def decoupled(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Clipped PPO around the proximal policy, times the constant weight min(exp(old - behaviour), cap).

    The clip bounds the step from the proximal policy, the weight corrects for the sampler's age; vanilla PPO asks one
    clip to do both and throws stale tokens away. Uses what `vanilla` uses and importance_cap.
    """
    weights_BR = truncated_weights(inputs.old_logprobs_BR, inputs.behaviour_logprobs_BR, cap=options.importance_cap)
    loss_BR, metrics = clipped_surrogate(inputs, options)
    metrics["importance_weight_mean"] = token_mean(weights_BR, inputs.mask_BR)
    if options.importance_cap is not None:
        metrics["importance_capped_fraction"] = token_mean(weights_BR >= options.importance_cap, inputs.mask_BR)
    return policy_loss(loss_BR * weights_BR, inputs, options, metrics)
