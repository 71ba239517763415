"""Packed sequences -> a few padded blocks of like lengths and back: attention for kernels that know no packing.

Shapes: T packed tokens, S sequences of a block, L tokens of its longest, H query heads, N key-value heads, D features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

MAX_PADDED_WORK = 1.3
"""Squares of padded lengths over squares of lengths, within a block."""
HALVES = (torch.bfloat16, torch.float16)
GRAIN = 16
"""Lengths that are equal when rounded up to this many tokens always share a block."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where packed tokens stand in padded blocks; a function of the lengths alone."""

    blocks: list[Tensor]
    """Per block [S, L]: the packed token that stands there. Padding repeats the last token of its sequence."""
    places_T: Tensor
    """Where each packed token stands in the flattened blocks, one after the other."""


_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def padded_attention(
    query_THD: Tensor,
    key_TND: Tensor,
    value_TND: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention within each sequence -> [T, H, D]. A token sees `window` tokens at most, itself included.

    Padding stands behind its sequence, where no real token looks, and is dropped: its gradient is exactly zero.
    """
    layout = layout_of(cu_seqlens)
    outputs = []
    for block_SL in layout.blocks:
        query_SHLD, key_SNLD, value_SNLD = (_gathered(packed, block_SL) for packed in (query_THD, key_TND, value_TND))
        mixed_SHLD = causal_attention(query_SHLD, key_SNLD, value_SNLD, scale=scale, window=window)
        outputs.append(mixed_SHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.places_T)


def causal_attention(
    query_SHLD: Tensor, key_SNLD: Tensor, value_SNLD: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """Of sequences of one length -> [S, H, L, D]."""
    groups, length = query_SHLD.shape[1] // key_SNLD.shape[1], query_SHLD.shape[2]
    banded = window is not None and window < length
    grouped = query_SHLD.is_cuda and query_SHLD.dtype in HALVES and not banded
    """Whether there is a kernel for groups of heads."""
    if groups > 1 and not grouped:
        key_SNLD, value_SNLD = key_SNLD.repeat_interleave(groups, 1), value_SNLD.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(
        query_SHLD,
        key_SNLD,
        value_SNLD,
        attn_mask=_band(length, window, query_SHLD.device) if window is not None and banded else None,
        is_causal=not banded,
        scale=scale,
        enable_gqa=groups > 1 and grouped,
    )


@torch.compiler.disable
def layout_of(cu_seqlens: Tensor) -> Layout:
    """The layout of these sequences, made once per tensor (not per layer, nor per recomputation).

    Reads the tensor on the host, the first time only: its values must not change.
    """
    layout: Layout | None = _layouts.get(cu_seqlens)  # type: ignore[no-untyped-call]
    if layout is None:
        layout = _layouts[cu_seqlens] = _laid_out(cu_seqlens.tolist(), cu_seqlens.device)
    return layout


def _laid_out(bounds: list[int], device: torch.device) -> Layout:
    starts, lengths = torch.tensor(bounds[:-1]), torch.tensor(bounds).diff()
    order = torch.argsort(lengths, descending=True, stable=True)
    places_T, blocks, filled = torch.empty(bounds[-1], dtype=torch.long), [], 0
    for rows_S in torch.split(order, _block_sizes(lengths[order].tolist())):
        column_L = torch.arange(int(lengths[rows_S[0]]))
        block_SL = starts[rows_S, None] + column_L.minimum(lengths[rows_S, None] - 1)
        real_SL = column_L < lengths[rows_S, None]
        places_T[block_SL[real_SL]] = filled + real_SL.flatten().nonzero().squeeze(1)
        blocks.append(block_SL.to(device))
        filled += block_SL.numel()
    return Layout(blocks, places_T.to(device))


def _block_sizes(lengths: list[int]) -> list[int]:
    """How many sequences each block takes; `lengths` come longest first."""
    sizes, longest, work = [0], 0, 0
    for length in lengths:
        square = (-(-length // GRAIN)) ** 2
        longest = longest or square
        if (sizes[-1] + 1) * longest > MAX_PADDED_WORK * (work + square):
            sizes, longest, work = [*sizes, 0], square, 0
        sizes[-1] += 1
        work += square
    return sizes


def _gathered(packed_THD: Tensor, block_SL: Tensor) -> Tensor:
    """[S, H, L, D]"""
    return packed_THD.index_select(0, block_SL.flatten()).view(*block_SL.shape, *packed_THD.shape[1:]).transpose(1, 2)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L]: which tokens a token sees in a sliding window."""
    ones_LL = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones_LL.tril_().triu_(1 - window)
