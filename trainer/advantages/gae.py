"""Generalised advantage estimation (arXiv 1506.02438), whitened as PPO implementations do. B samples, R tokens."""

import torch

from trainer.advantages.moments import whiten
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def gae(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """delta_t = r_t + gamma V_{t+1} - V_t; L_t = delta_t + gamma lam L_{t+1}; A = whiten(L); returns = L + V.

    On tokens that do not count V and L are carried from the next one that does. A is not masked again: padding is not
    zero. Raises ValueError without values: they come from a critic.
    """
    rewards_BR, values_BR, mask_BR = inputs.token_rewards_BR, inputs.values_BR, inputs.mask_BR
    if values_BR is None:
        raise ValueError("gae needs the values of a critic (trainer.critic)")
    raw_BR = torch.zeros_like(rewards_BR)
    value_B = torch.zeros_like(rewards_BR[:, 0])
    carried_B = torch.zeros_like(value_B)
    for t in reversed(range(rewards_BR.shape[1])):
        counts_B = mask_BR[:, t] > 0
        delta_B = rewards_BR[:, t] + options.gamma * value_B - values_BR[:, t]
        carried_B = torch.where(counts_B, delta_B + options.gamma * options.lam * carried_B, carried_B)
        value_B = torch.where(counts_B, values_BR[:, t], value_B)
        raw_BR[:, t] = carried_B
    return AdvantageOutputs(advantages_BR=whiten(raw_BR, mask_BR), returns_BR=raw_BR + values_BR)
