"""REINFORCE++ (arXiv 2501.03262): discounted returns, whitened over the whole batch; no group, no baseline."""

import torch

from trainer.advantages.moments import whiten
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """G_t = r_t + gamma G_{t+1} over counted tokens; A = whiten(G), 0 where a token does not count; returns = G.

    G passes tokens that do not count (a tool's output) undiscounted, and rewards that stand on them are left out. The
    KL of the paper comes in with kl_use='reward'. Uses gamma.
    """
    rewards_BR, mask_BR = inputs.token_rewards_BR, inputs.mask_BR
    returns_BR = torch.zeros_like(rewards_BR)
    carried_B = torch.zeros_like(rewards_BR[:, 0])
    for t in reversed(range(rewards_BR.shape[1])):
        carried_B = torch.where(mask_BR[:, t] > 0, rewards_BR[:, t] + options.gamma * carried_B, carried_B)
        returns_BR[:, t] = carried_B
    returns_BR = returns_BR * mask_BR
    return AdvantageOutputs(advantages_BR=whiten(returns_BR, mask_BR) * mask_BR, returns_BR=returns_BR)
