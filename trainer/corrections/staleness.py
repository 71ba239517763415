"""What the correction looks like on fresh and on stale tokens. B samples, R response tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.batch import Trajectory
from trainer.corrections.ratio import effective_sample_share, log_ratio
from trainer.metrics import StepMetrics


def token_staleness(trajectories: Sequence[Trajectory], *, policy_version: int, width: int) -> Tensor:
    """Versions between the trainer's and the one that sampled each token, int64 [B, R]; padding holds 0."""
    rows = np.zeros((len(trajectories), width), np.int64)
    for row, trajectory in zip(rows, trajectories, strict=True):
        versions, counts = zip(*trajectory.spans, strict=True)
        row[: sum(counts)] = policy_version - np.repeat(versions, counts)
    return torch.from_numpy(rows)


@torch.no_grad()
def by_staleness(
    old_BR: Tensor, behaviour_BR: Tensor, mask_BR: Tensor, kept_BR: Tensor, staleness_BR: Tensor
) -> StepMetrics:
    """For each staleness of counted tokens: how many, |logprob difference|, importance ratio, its ESS, rejections."""
    found: StepMetrics = {}
    for staleness in torch.unique(staleness_BR[mask_BR > 0]).tolist():
        chosen_BR = (mask_BR > 0) & (staleness_BR == staleness)
        ratio_N = log_ratio(old_BR, behaviour_BR)[chosen_BR].exp()
        mean, square = float(ratio_N.mean()), float(ratio_N.square().mean())
        figures = {
            "tokens": float(len(ratio_N)),
            "logprob_diff_mean": float((old_BR - behaviour_BR)[chosen_BR].abs().mean()),
            "importance_ratio_mean": mean,
            "ess": effective_sample_share(mean=mean, mean_square=square),
            "rejected_token_share": float((kept_BR[chosen_BR] == 0).double().mean()),
        }
        found |= {f"{name}_staleness_{staleness}": value for name, value in figures.items()}
    return found
