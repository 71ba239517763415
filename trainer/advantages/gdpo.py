"""Group reward-decoupled normalisation (GDPO, arXiv 2601.05242): each part of the reward is normed by itself."""

import torch

from trainer.advantages.grpo import relative
from trainer.advantages.moments import whiten
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def gdpo(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A = whiten(sum_k weight_k GRPO(r_k)) over counted tokens, 0 elsewhere; returns = A.

    The token rewards are not looked at: neither the total of the parts nor a KL in the reward counts. Conditioned
    rewards of the paper are the reward function's affair. Uses part_weights and norm_by_std. Raises ValueError without
    the parts.
    """
    if inputs.reward_parts_BK is None:
        raise ValueError("gdpo needs the parts of the reward")
    parts_KB = inputs.reward_parts_BK.T
    advantages_B = torch.zeros_like(parts_KB[0])
    for weight, part_B in zip(options.part_weights, parts_KB, strict=True):
        advantages_B += weight * relative(part_B, inputs.group_B, norm_by_std=options.norm_by_std)
    advantages_BR = whiten(advantages_B[:, None] * inputs.mask_BR, inputs.mask_BR) * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)
