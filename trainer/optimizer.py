"""AdamW, its learning-rate schedule and the clipped update."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from trainer.configs.update import OptimizerConfig
from trainer.parallel import ALONE, Ranks

CLIP_EPSILON = 1e-6


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW over every parameter that takes a gradient, in the model's order."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def learning_rate(position: int, config: OptimizerConfig) -> float:
    """Learning rate of the training step with this number, from 0 on.

    Warm-up: lr * position / warmup_steps. Then constant, or down to min_lr_ratio * lr at total_steps, along a line or
    half a cosine, and constant from there.
    """
    if position < config.warmup_steps:
        return config.lr * position / config.warmup_steps
    if config.total_steps is None or config.schedule == "constant":
        return config.lr
    progress = min(1.0, (position - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def update(
    optimizer: torch.optim.Optimizer,
    loss: float,
    *,
    lr: float,
    max_grad_norm: float | None,
    ranks: Ranks = ALONE,
) -> tuple[float, bool]:
    """Sums over ranks, clips, steps and clears the gradients; gives their 2-norm before clipping, and whether the step
    was taken.

    A loss or norm that is not finite takes no step and leaves weights and moments as they were. A parameter without a
    gradient has one of zeros: AdamW's moments and weight decay act even on a batch without any.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters]
    ranks.sum_gradients(gradients)
    norm = _norm(gradients)
    taken = math.isfinite(norm) and math.isfinite(loss)
    if taken:
        if max_grad_norm is not None and norm + CLIP_EPSILON > max_grad_norm:
            torch._foreach_mul_(gradients, max_grad_norm / (norm + CLIP_EPSILON))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, taken


def _norm(gradients: list[Tensor]) -> float:
    """2-norm of all gradients; where they are sharded, of all shards."""
    norm = get_total_norm(gradients)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
