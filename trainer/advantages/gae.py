"""Generalised advantage estimation (arXiv 1506.02438), whitened as PPO implementations do. B samples, R tokens."""

import torch
from torch import Tensor

from trainer.advantages.moments import whiten
from trainer.advantages.types import AdvantageOutputs


def gae(rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, *, gamma: float, lam: float) -> AdvantageOutputs:
    """delta_t = r_t + gamma V_{t+1} - V_t; L_t = delta_t + gamma lam L_{t+1}; A = whiten(L); returns = L + V.

    On tokens that do not count V and L are carried from the next one that does. A is not masked again: padding is not
    zero. Not an estimator of the default loop: it needs a value model.
    """
    raw_BR = torch.zeros_like(rewards_BR)
    value_B = torch.zeros_like(rewards_BR[:, 0])
    carried_B = torch.zeros_like(value_B)
    for t in reversed(range(rewards_BR.shape[1])):
        counts_B = mask_BR[:, t] > 0
        delta_B = rewards_BR[:, t] + gamma * value_B - values_BR[:, t]
        carried_B = torch.where(counts_B, delta_B + gamma * lam * carried_B, carried_B)
        value_B = torch.where(counts_B, values_BR[:, t], value_B)
        raw_BR[:, t] = carried_B
    return AdvantageOutputs(advantages_BR=whiten(raw_BR, mask_BR), returns_BR=raw_BR + values_BR)
