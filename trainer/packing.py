"""A batch -> micro-batches without padding, by token budget, equally many for each rank and equally heavy.

Dimensions: S samples of the micro-batch, one after the other in T tokens; R response tokens, N counted ones.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.batch import Batch


class PackedTokens(NamedTuple):
    """What a policy reads, on its device. A tuple, so that FSDP2 sees the tensors in it."""

    input_ids_1T: Tensor
    position_ids_1T: Tensor
    """From 0 in each sample."""
    cu_seqlens: Tensor
    """int32, [S + 1]: where the samples begin, and T."""
    max_length: int
    """Tokens of the longest sample."""
    positions_N: Tensor
    """Into T: where each counted token is predicted (one to its left)."""
    targets_N: Tensor
    """Its token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a batch, on the device."""

    rows_B: Tensor
    """Which rows of the batch, on the CPU; none where a rank only keeps the others company in a collective."""
    width: int
    """R of this micro-batch."""
    tokens: PackedTokens
    slots_N: Tensor
    """Place of each counted token in the flattened [S, R]."""

    @property
    def idle(self) -> bool:
        return not len(self.rows_B)

    def scatter(self, values_N: Tensor) -> Tensor:
        """Values of counted tokens -> [S, R], zero elsewhere; differentiable."""
        flat = values_N.new_zeros(len(self.rows_B) * self.width)
        return flat.index_copy(0, self.slots_N, values_N).view(len(self.rows_B), self.width)


def pack(lengths_B: Tensor, *, max_tokens: int, ranks: int = 1) -> list[list[Tensor]]:
    """For each rank the row numbers of its micro-batches, equally many; some are empty where rows are few.

    No micro-batch exceeds `max_tokens` but for a sample that is longer, which goes alone and whole. The next longest
    sample goes where least has gathered, and ranks run micro-batches of like size side by side. The result depends on
    the lengths only.
    """
    lengths = lengths_B.numpy()
    order = np.argsort(-lengths, kind="stable")
    if not len(order):
        return [[] for _ in range(ranks)]
    count = ranks * -(-min(-(-int(lengths.sum()) // max_tokens), len(order)) // ranks)
    while (parts := _balanced(order, lengths, count, max_tokens)) is None:
        count += ranks
    parts.sort(key=lambda part: -int(lengths[part].sum()))
    return [[torch.tensor(part, dtype=torch.int64) for part in parts[rank::ranks]] for rank in range(ranks)]


def _balanced(
    order: np.ndarray[tuple[int], np.dtype[np.int64]],
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    count: int,
    max_tokens: int,
) -> list[list[int]] | None:
    """`count` parts, each row to the one with the fewest tokens so far; None where one grows over the budget."""
    parts: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0, number) for number in range(count)]
    for row in order.tolist():
        tokens, number = lightest[0]
        length = int(lengths[row])
        if tokens and tokens + length > max_tokens:
            return None
        heapq.heapreplace(lightest, (tokens + length, number))
        parts[number].append(row)
    return parts


def micro_batch(batch: Batch, rows_B: Tensor, *, device: torch.device) -> MicroBatch:
    """Picks `rows_B` out of `batch`; tokens outside the loss mask get no position, hence no logits.

    The last token of a sample predicts nothing that is asked for, so the model does not see it. Without rows there is
    one token, and nothing is asked about it.
    """
    if not len(rows_B):
        return _company(device)
    prompts_S, seen_S = batch.prompt_lengths_B[rows_B], batch.lengths_B[rows_B] - 1
    ends_S, width = seen_S.cumsum(0), int(batch.response_lengths_B[rows_B].max())
    starts_S = ends_S - seen_S
    position_ids_T = torch.arange(int(ends_S[-1])) - starts_S.repeat_interleave(seen_S)
    row_N, column_N = batch.mask_BR[rows_B, :width].nonzero(as_tuple=True)
    predicted_N = prompts_S[row_N] + column_N
    tokens = PackedTokens(
        input_ids_1T=batch.input_ids_BT[rows_B.repeat_interleave(seen_S), position_ids_T][None],
        position_ids_1T=position_ids_T[None],
        cu_seqlens=torch.cat([starts_S, ends_S[-1:]]).int(),
        max_length=int(seen_S.max()),
        positions_N=starts_S[row_N] + predicted_N - 1,
        targets_N=batch.input_ids_BT[rows_B[row_N], predicted_N],
    )
    return MicroBatch(
        rows_B=rows_B, width=width, tokens=_on(tokens, device), slots_N=_to(row_N * width + column_N, device)
    )


def _company(device: torch.device) -> MicroBatch:
    zero, none = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    tokens = PackedTokens(zero, zero, torch.tensor([0, 1], dtype=torch.int32), 1, none, none)
    return MicroBatch(rows_B=none, width=0, tokens=_on(tokens, device), slots_N=none.to(device))


def _on(tokens: PackedTokens, device: torch.device) -> PackedTokens:
    return tokens._replace(
        input_ids_1T=_to(tokens.input_ids_1T, device),
        position_ids_1T=_to(tokens.position_ids_1T, device),
        cu_seqlens=_to(tokens.cu_seqlens, device),
        positions_N=_to(tokens.positions_N, device),
        targets_N=_to(tokens.targets_N, device),
    )


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)
