"""The whole correction of one batch, before its advantages are estimated: weights, rejection, figures.

Weights and statistics are of the mask as it came; rejected tokens then leave the mask, and with it every loss, count
and whitening. Their rewards stay in the baseline of their group. Dimensions: B samples, R response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.batch import Batch, Trajectory
from trainer.configs.correction import CorrectionConfig
from trainer.corrections.ratio import effective_sample_share
from trainer.corrections.rejection import kept_by, statistic
from trainer.corrections.second_moment import second_moment_mask
from trainer.corrections.staleness import by_staleness, token_staleness
from trainer.corrections.weights import bounded, importance_weights, normalized
from trainer.metrics import StepMetrics, absolute_differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Constants of one step, on the CPU."""

    mask_BR: Tensor
    """1.0 where a token counts and was not rejected."""
    weights_BR: Tensor | None
    """Factor of every per-token policy loss; None: 1."""
    metrics: StepMetrics


@torch.no_grad()
def correct(
    config: CorrectionConfig, batch: Batch, old_BR: Tensor, trajectories: Sequence[Trajectory], *, policy_version: int
) -> Correction:
    """Compare the proximal logprobs [B, R] with the behaviour's, as the config says."""
    mask_BR, behaviour_BR = batch.mask_BR, batch.behaviour_logprobs_BR
    weights_BR, metrics = _weights(config, old_BR, behaviour_BR, mask_BR)
    kept_BR, rejections = _kept(config, old_BR, behaviour_BR, mask_BR)
    staleness_BR = token_staleness(trajectories, policy_version=policy_version, width=mask_BR.shape[1])
    return Correction(
        mask_BR=mask_BR * kept_BR,
        weights_BR=weights_BR,
        metrics=metrics
        | rejections
        | absolute_differences([(old_BR - behaviour_BR)[mask_BR > 0].abs()] if mask_BR.any() else [])
        | by_staleness(old_BR, behaviour_BR, mask_BR, kept_BR, staleness_BR),
    )


def _weights(
    config: CorrectionConfig, old_BR: Tensor, behaviour_BR: Tensor, mask_BR: Tensor
) -> tuple[Tensor | None, StepMetrics]:
    if config.weights == "none":
        return None, {}
    plain_BR = importance_weights(old_BR, behaviour_BR, mask_BR, level=config.weights)
    weights_BR = bounded(plain_BR, bound=config.bound, low=config.weight_min, high=config.weight_max)
    tokens = float(mask_BR.sum().clamp(min=1))
    metrics = {"importance_bounded_fraction": float((weights_BR != plain_BR).sum()) / tokens}
    if config.normalize:
        weights_BR, mean = normalized(weights_BR, mask_BR, level=config.weights)
        metrics["importance_weight_norm"] = mean
    mean, square = float(weights_BR.sum()) / tokens, float(weights_BR.square().sum()) / tokens
    return weights_BR, metrics | {
        "importance_weight_mean": mean,
        "importance_weight_max": float(weights_BR.max()),
        "importance_weight_ess": effective_sample_share(mean=mean, mean_square=square),
    }


def _kept(
    config: CorrectionConfig, old_BR: Tensor, behaviour_BR: Tensor, mask_BR: Tensor
) -> tuple[Tensor, StepMetrics]:
    counted_BR = mask_BR > 0
    parts = {
        rule.statistic: kept_by(
            statistic(old_BR, behaviour_BR, mask_BR, name=rule.statistic),
            name=rule.statistic,
            low=rule.low,
            high=rule.high,
        )
        for rule in config.reject
    }
    if config.second_moment is not None:
        parts["second_moment"] = second_moment_mask(old_BR, behaviour_BR, mask_BR, threshold=config.second_moment)
    kept_BR, metrics = torch.ones_like(counted_BR), {}
    for name, part in parts.items():
        kept_BR &= part
        metrics[f"rejected_token_share/{name}"] = _share(counted_BR & ~part, counted_BR)
    if parts:
        metrics["rejected_token_share"] = _share(counted_BR & ~kept_BR, counted_BR)
        metrics["rejected_sample_share"] = _share(~(counted_BR & kept_BR).any(-1), counted_BR.any(-1))
    return kept_BR, metrics


def _share(chosen: Tensor, among: Tensor) -> float:
    return float((chosen & among).sum() / among.sum().clamp(min=1))
