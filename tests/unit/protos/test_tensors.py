"""Checksums of torch buffers against the plain definition, and views into buckets."""

import numpy as np
import pytest
import torch

from protos import TensorSpec
from protos.buckets import checksum, make_manifest, plan_buckets
from protos.generated.trajectory_pb2 import DType
from protos.tensors import WORDS, checksums, make_buffers, named_views, signed


@pytest.mark.parametrize("words", [1, 7, WORDS - 1, WORDS, WORDS + 1, 3 * WORDS, 3 * WORDS + 5])
def test_a_checksum_is_the_one_that_numpy_computes(words: int) -> None:
    draw = np.random.default_rng(words)
    data = draw.integers(0, 256, size=8 * words, dtype=np.uint8)
    assert checksums([torch.from_numpy(data)]) == [checksum(data)]


def test_a_flipped_bit_and_a_swap_of_words_change_it() -> None:
    data = torch.arange(WORDS * 16, dtype=torch.int64).view(torch.uint8).clone()
    before = checksums([data])
    data[8 * WORDS + 3] ^= 1
    assert checksums([data]) != before
    data[8 * WORDS + 3] ^= 1
    assert checksums([data]) == before
    words = data.view(torch.int64)
    words[[1, WORDS + 1]] = words[[WORDS + 1, 1]]
    assert checksums([data]) != before


def test_signed_keeps_the_bits() -> None:
    assert signed(2**64 - 1) == -1
    assert signed(2**63) == -(2**63)
    assert signed(2**63 - 1) == 2**63 - 1
    assert signed(2**64 + 5) == 5


def test_views_lie_in_the_buckets() -> None:
    specs = [
        TensorSpec(name="a", dtype=DType.DTYPE_FLOAT32, shape=(2, 3)),
        TensorSpec(name="b", dtype=DType.DTYPE_BFLOAT16, shape=(5,)),
        TensorSpec(name="c", dtype=DType.DTYPE_FLOAT32, shape=(100,)),
    ]
    plan = plan_buckets(make_manifest(specs, bucket_bytes=64))
    buffers = make_buffers(plan, device=torch.device("cpu"))
    views = dict(named_views(plan, buffers))
    assert {name: (view.dtype, tuple(view.shape)) for name, view in views.items()} == {
        "a": (torch.float32, (2, 3)),
        "b": (torch.bfloat16, (5,)),
        "c": (torch.float32, (100,)),
    }
    views["b"].fill_(1.0)
    assert [buffer.count_nonzero().item() for buffer in buffers] == [10, 0], "1.0 in bfloat16 is 0x3f80: two bytes each"
