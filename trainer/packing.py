"""A batch -> micro-batches by token budget, and the flat indices by which they meet the model.

Dimensions: B samples of the micro-batch, T tokens, R response tokens, N counted response tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a batch, on the device, cut to their own widths."""

    rows_B: Tensor
    """Which rows of the batch, on the CPU."""
    width: int
    """R of this micro-batch."""
    input_ids_BT: Tensor
    positions_N: Tensor
    """Into the flattened input_ids_BT: where each counted token is predicted (one to its left)."""
    targets_N: Tensor
    """Its token id."""
    slots_N: Tensor
    """Its place in the flattened [B, R]."""

    def scatter(self, values_N: Tensor) -> Tensor:
        """Values of counted tokens -> [B, R], zero elsewhere; differentiable."""
        flat = values_N.new_zeros(len(self.rows_B) * self.width)
        return flat.index_copy(0, self.slots_N, values_N).view(-1, self.width)


def pack(lengths_B: Tensor, *, max_tokens: int) -> list[Tensor]:
    """Row numbers of each micro-batch: longest first, as many as stay within `max_tokens` with their padding.

    A sample longer than the budget goes alone. Samples of equal length keep their order, so the result depends on the
    lengths only.
    """
    lengths = lengths_B.numpy()
    order = np.argsort(-lengths, kind="stable")
    parts, start = [], 0
    while start < len(order):
        count = max(1, max_tokens // int(lengths[order[start]]))
        parts.append(torch.from_numpy(order[start : start + count]))
        start += count
    return parts


def micro_batch(batch: Batch, rows_B: Tensor, *, device: torch.device) -> MicroBatch:
    """Picks `rows_B` out of `batch`; tokens outside the loss mask get no position, hence no logits.

    The last column predicts nothing that is asked for, so the model does not see it.
    """
    prompt_lengths_B, lengths_B = batch.prompt_lengths_B[rows_B], batch.lengths_B[rows_B]
    tokens, width = int(lengths_B.max()), int(batch.response_lengths_B[rows_B].max())
    input_ids_BT = batch.input_ids_BT[rows_B, :tokens]
    row_N, column_N = batch.mask_BR[rows_B, :width].nonzero(as_tuple=True)
    predicted_N = row_N * tokens + prompt_lengths_B[row_N] + column_N
    return MicroBatch(
        rows_B=rows_B,
        width=width,
        input_ids_BT=input_ids_BT[:, :-1].to(device, non_blocking=True),
        positions_N=(predicted_N - 1 - row_N).to(device, non_blocking=True),
        targets_N=input_ids_BT.flatten()[predicted_N].to(device, non_blocking=True),
        slots_N=(row_N * width + column_N).to(device, non_blocking=True),
    )
