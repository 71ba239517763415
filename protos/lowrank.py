"""Weights that change by a product of low rank: the same sum at both ends of a push. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from protos.tensors import checksum_of, fetch

BLOCK_ELEMENTS = 1 << 24
"""Elements that are float32 at a time: 64 MiB for the sum and as much for the base."""


@torch.no_grad()
def add_low_rank(place: Tensor, base: Tensor, a: Tensor, b: Tensor, *, scaling: float) -> None:
    """place = base + scaling * b @ a, in float32, then cast; place and base [out, in], a [rank, in], b [out, rank].

    place may be the base itself. The rows go in blocks, which are the same wherever this runs.
    """
    a = a.float()
    rows = max(1, BLOCK_ELEMENTS // base.shape[1])
    for begin in range(0, base.shape[0], rows):
        at = slice(begin, begin + rows)
        place[at].copy_(torch.addmm(base[at].float(), b[at].float(), a, alpha=scaling))


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """The checksum of each tensor's bytes, computed where it lies; zeros fill up its last 64-bit word."""
    return fetch([_fingerprint(tensor) for tensor in tensors])


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return checksum_of(pad(flat, (0, -len(flat) % 8)))
