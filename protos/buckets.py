"""How tensors lie in the buckets of a push. Both ends derive the same plan from the manifest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos.arrays import NUMPY_DTYPES
from protos.generated.weights_pb2 import LowRankUpdate, Manifest, TensorSpec

ALIGNMENT_BYTES = 16
ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one tensor lies."""

    name: str
    dtype: int
    """DType of the wire."""
    shape: tuple[int, ...]
    offset: int
    """First byte inside the bucket."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One flat buffer of a push."""

    slots: tuple[Slot, ...]
    num_bytes: int


def make_manifest(
    tensors: Iterable[TensorSpec], *, bucket_bytes: int, low_rank: Iterable[LowRankUpdate] = ()
) -> Manifest:
    """Describe a model; the hash names the description so that it is sent once."""
    manifest = Manifest(tensors=tensors, bucket_bytes=bucket_bytes, low_rank=low_rank)
    manifest.hash = hashlib.sha256(manifest.SerializeToString(deterministic=True)).hexdigest()
    return manifest


def weights_of(manifest: Manifest) -> list[TensorSpec]:
    """The weights that a version of this description changes; ValueError where the factors of one do not fit."""
    if not manifest.low_rank:
        return list(manifest.tensors)
    shapes = {spec.name: tuple(spec.shape) for spec in manifest.tensors}
    return [
        TensorSpec(name=one.name, dtype=one.dtype, shape=_product_shape(one.name, shapes.get(one.a), shapes.get(one.b)))
        for one in manifest.low_rank
    ]


def _product_shape(name: str, a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, int]:
    if a is None or b is None or len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise ValueError(f"{name}: factors {a} and {b} are not [rank, in] and [out, rank]")
    return b[0], a[1]


def plan_buckets(manifest: Manifest) -> tuple[Bucket, ...]:
    """Fill buckets of at most `bucket_bytes` in the order of the manifest; a larger tensor has one of its own."""
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    offset = 0
    for spec in manifest.tensors:
        num_bytes = math.prod(spec.shape) * NUMPY_DTYPES[spec.dtype].itemsize
        if slots and offset + num_bytes > manifest.bucket_bytes:
            buckets.append(Bucket(slots=tuple(slots), num_bytes=offset))
            slots, offset = [], 0
        slot = Slot(name=spec.name, dtype=spec.dtype, shape=tuple(spec.shape), offset=offset, num_bytes=num_bytes)
        slots.append(slot)
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if slots:
        buckets.append(Bucket(slots=tuple(slots), num_bytes=offset))
    return tuple(buckets)


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """Position-weighted sum of the 64-bit words of a bucket, modulo 2**64.

    Cheap on any device and exact in integers: a flipped bit, a swapped pair or a shifted range changes it. It guards
    against torn transfers, not against forgery. The length must be a multiple of 8, which ALIGNMENT_BYTES assures.
    """
    words = data.view(np.uint64)
    position = np.arange(1, words.size + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return int((words * (position * np.uint64(ODD) | np.uint64(1))).sum(dtype=np.uint64))


def weights_hash(manifest_hash: str, sums: Sequence[int]) -> str:
    """Names a state of the weights; equal at both ends of a push."""
    return hashlib.sha256(f"{manifest_hash}:{','.join(map(str, sums))}".encode()).hexdigest()
