"""The loss of a critic, clipped around its old values as PPO's is (arXiv 1707.06347). B samples, R response tokens."""

import torch
from torch import Tensor

from trainer.losses.aggregate import aggregate
from trainer.losses.types import Denominators, LossOutputs
from trainer.metrics import Metric, token_mean


def value_loss(
    values_BR: Tensor,
    old_values_BR: Tensor,
    returns_BR: Tensor,
    mask_BR: Tensor,
    *,
    clip: float,
    aggregation: str,
    denominators: Denominators,
    scale_factor: float | None = None,
) -> LossOutputs:
    """agg(max((v - return)^2, (clip(v, old - clip, old + clip) - return)^2)) / 2.

    `values_BR` carries the gradient; `old_values_BR` are those from before the batch's first update. Leaves out the
    Huber and the distributional form.
    """
    bounded_BR = values_BR.clamp(old_values_BR - clip, old_values_BR + clip)
    free_BR, clipped_BR = (values_BR - returns_BR).square(), (bounded_BR - returns_BR).square()
    loss = 0.5 * aggregate(
        torch.maximum(free_BR, clipped_BR),
        mask_BR,
        mode=aggregation,
        denominators=denominators,
        scale_factor=scale_factor,
    )
    metrics = {
        "value_loss": Metric(loss.detach(), "sum"),
        "value_clip_fraction": token_mean(clipped_BR > free_BR, mask_BR),
        "value_mean": token_mean(values_BR.detach(), mask_BR),
    }
    return LossOutputs(loss=loss, metrics=metrics)
