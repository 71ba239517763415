"""The buckets of a push as torch tensors: dtypes, views, checksums on any device. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from protos.buckets import ODD, Bucket, Slot
from protos.generated.trajectory_pb2 import DType

TORCH_DTYPES: dict[int, torch.dtype] = {
    DType.DTYPE_FLOAT32: torch.float32,
    DType.DTYPE_FLOAT16: torch.float16,
    DType.DTYPE_BFLOAT16: torch.bfloat16,
    DType.DTYPE_FLOAT64: torch.float64,
    DType.DTYPE_INT32: torch.int32,
    DType.DTYPE_INT64: torch.int64,
    DType.DTYPE_UINT8: torch.uint8,
}
WIRE_DTYPES = cast("dict[torch.dtype, DType.ValueType]", {dtype: wire for wire, dtype in TORCH_DTYPES.items()})
WORDS = 1 << 17
"""Words of 64 bits in one row of a checksum: the factors of one row serve all."""


def make_buffers(plan: Sequence[Bucket], *, device: torch.device) -> list[Tensor]:
    """One flat uint8 buffer for each bucket. Zeros: the gaps between slots count in the checksum too."""
    return [torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=device) for bucket in plan]


def view(buffer: Tensor, slot: Slot) -> Tensor:
    """The tensor that lies in `slot` of a bucket, without a copy."""
    flat = buffer[slot.offset : slot.offset + slot.num_bytes]
    return flat.view(TORCH_DTYPES[slot.dtype]).view(slot.shape)


def named_views(plan: Sequence[Bucket], buffers: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """(name, tensor) in the order of the manifest; views into the buffers."""
    pairs = zip(plan, buffers, strict=True)
    return [(slot.name, view(buffer, slot)) for bucket, buffer in pairs for slot in bucket.slots]


def checksums(buffers: Sequence[Tensor]) -> list[int]:
    """`protos.buckets.checksum` of each buffer, computed where it lies, fetched at once."""
    return fetch([checksum_of(buffer) for buffer in buffers])


def fetch(sums: Sequence[Tensor]) -> list[int]:
    """What `checksum_of` has computed, in host memory: waits for the device once."""
    return [one % (1 << 64) for one in torch.stack(list(sums)).tolist()] if sums else []


@torch.no_grad()
def checksum_of(buffer: Tensor) -> Tensor:
    """The checksum of one buffer, int64 of no dimension on its device; the host does not wait for it.

    Word i counts i * ODD | 1 times. A row begins at an even word b, where that is b * ODD more than in row 0."""
    words = buffer.view(torch.int64)
    whole = len(words) // WORDS * WORDS
    factors = _factors(buffer.device)
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    if whole:
        rows = words[:whole].view(-1, WORDS)
        first = torch.arange(0, whole, WORDS, device=buffer.device) * signed(ODD)
        total = (rows * factors).sum() + (rows.sum(1) * first).sum()
    if whole < len(words):
        rest = words[whole:]
        total = total + (rest * factors[: len(rest)]).sum() + rest.sum() * signed(ODD * whole)
    return total


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    positions = torch.arange(1, WORDS + 1, dtype=torch.int64, device=device)
    return positions * signed(ODD) | 1


def signed(value: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value
