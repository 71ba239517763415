"""PF-PPO (arXiv 2409.06957): samples are drawn anew, so that those whose reward can be trusted come more often.

B samples. The batch keeps its size; some samples stand in it several times, others not at all.
"""

import torch
from torch import Tensor

from trainer.metrics import StepMetrics

EPSILON = 1e-8


def resampling_weights(rewards_B: Tensor, *, method: str, power: float) -> Tensor:
    """Unnormalized chances [B]: pow: |R|^power. max_min: 1 at the largest and smallest R, else 0. max_random: .4, .1.

    1e-8 is added, so that every sample has a chance. Raises ValueError on another method.
    """
    highest_B = rewards_B == rewards_B.max()
    match method:
        case "pow":
            weights_B = rewards_B.abs() ** power
        case "max_min":
            weights_B = (highest_B | (rewards_B == rewards_B.min())).to(rewards_B)
        case "max_random":
            weights_B = torch.full_like(rewards_B, 0.1).masked_fill(highest_B, 0.4)
        case _:
            raise ValueError(f"unknown resampling {method!r}")
    return weights_B + EPSILON


def resample(rewards_B: Tensor, *, method: str, power: float, generator: torch.Generator) -> Tensor:
    """Row numbers [B], drawn with replacement by those chances."""
    weights_B = resampling_weights(rewards_B, method=method, power=power)
    return torch.multinomial(weights_B, len(weights_B), replacement=True, generator=generator)


def resampling_metrics(rows_B: Tensor) -> StepMetrics:
    """Share of the samples that were drawn at least once."""
    return {"resampled_unique_share": len(torch.unique(rows_B)) / max(len(rows_B), 1)}
