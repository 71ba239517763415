"""How far the logprobs of each rollout server are from the trainer's. N counted response tokens of a batch.

Only weights that are the same can be compared exactly: the trainer's figures are of the weights that the step began
with, and samples are told apart by staleness: in an older one the policy's own movement is part of the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trainer.batch import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One server's samples of one staleness."""

    server: str
    staleness: int
    """Trainer's policy_version less the oldest version in the sample."""
    num_tokens: int
    mean: float
    """Of |behaviour - trainer| logprobs, nats."""


def mismatches(
    rows_N: Tensor, differences_N: Tensor, trajectories: Sequence[Trajectory], *, policy_version: int
) -> list[Mismatch]:
    """Means of differences [N] by server and staleness of the trajectory `rows_N` that each token belongs to."""
    labels = [(t.server, policy_version - min(version for version, _ in t.spans)) for t in trajectories]
    cells = sorted(set(labels))
    cell_B = np.array([cells.index(label) for label in labels])
    cell_N = cell_B[rows_N.cpu().numpy()]
    counts = np.bincount(cell_N, minlength=len(cells))
    sums = np.bincount(cell_N, weights=differences_N.double().cpu().numpy(), minlength=len(cells))
    return [
        Mismatch(server=server, staleness=staleness, num_tokens=int(count), mean=float(total / count))
        for (server, staleness), count, total in zip(cells, counts, sums, strict=True)
        if count
    ]
