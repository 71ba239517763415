"""One optimizer update, of the policy or of the critic: backward over this rank's micro-batches, sums over all ranks,
clip, AdamW, and the guards' look at what was left out."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.batch import Batch
from trainer.guarding.guards import Guards, Trained, suspects
from trainer.model.offload import Offload
from trainer.optimizer import update
from trainer.packing import MicroBatch
from trainer.scoring import Scorer


class Update(NamedTuple):
    """What one came to, over all ranks."""

    loss: float
    grad_norm: float
    """Before clipping."""
    taken: bool
    """Loss and gradient were finite."""


class Optimization:
    """The updates of one model."""

    def __init__(
        self,
        scorer: Scorer,
        optimizer: torch.optim.Optimizer,
        offload: Offload,
        guards: Guards,
        *,
        max_grad_norm: float | None,
        of: Trained = "policy",
    ) -> None:
        self._scorer = scorer
        self._optimizer = optimizer
        self._offload = offload
        self._guards = guards
        self._max_grad_norm = max_grad_norm
        self._of: Trained = of

    def update(
        self,
        batch: Batch,
        rows_B: Tensor,
        backward: Callable[[MicroBatch], Tensor],
        *,
        computed_B: Tensor,
        lr: float,
    ) -> Update:
        """On the samples `rows_B`, of which `computed_B` are run; `backward`: a micro-batch -> its part of the loss."""
        ranks, size = self._scorer.ranks, batch.size
        loss, parts = torch.zeros((), dtype=torch.float64, device=self._scorer.device), []
        for micro in self._scorer.micro_batches(batch, computed_B):
            part = backward(micro)
            loss += part
            parts.append((micro.rows_B, part))
        with self._offload.moments():
            total = ranks.total(loss)
            norm, taken = update(self._optimizer, total, lr=lr, max_grad_norm=self._max_grad_norm, ranks=ranks)
        if taken:
            self._guards.taken(of=self._of)
        else:
            suspects_B = suspects(parts, size=size, ranks=ranks)
            self._guards.skipped(loss=total, grad_norm=norm, rows_B=rows_B, suspects_B=suspects_B, of=self._of)
        return Update(total, norm, taken)
