"""Buckets of a push: both ends derive the same plan, and a checksum notices what a transfer can do to bytes."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import protos
from protos.arrays import NUMPY_DTYPES
from protos.buckets import ALIGNMENT_BYTES, checksum, make_manifest, plan_buckets, weights_hash

Words = npt.NDArray[np.uint8]


def spec(name: str, *shape: int, dtype: int = protos.DTYPE_FLOAT32) -> protos.TensorSpec:
    return protos.TensorSpec(name=name, dtype=dtype, shape=shape)  # type: ignore[arg-type]


def test_tensors_fill_buckets_in_order() -> None:
    manifest = make_manifest([spec("a", 4), spec("b", 3), spec("c", 5), spec("d", 1)], bucket_bytes=48)
    first, second = plan_buckets(manifest)
    assert [(slot.name, slot.offset, slot.num_bytes) for slot in first.slots] == [("a", 0, 16), ("b", 16, 12)]
    assert [(slot.name, slot.offset, slot.num_bytes) for slot in second.slots] == [("c", 0, 20), ("d", 32, 4)]
    assert (first.num_bytes, second.num_bytes) == (32, 48)


def test_a_tensor_larger_than_a_bucket_has_one_of_its_own() -> None:
    plan = plan_buckets(make_manifest([spec("a", 1), spec("big", 100), spec("b", 1)], bucket_bytes=64))
    assert [[slot.name for slot in bucket.slots] for bucket in plan] == [["a"], ["big"], ["b"]]
    assert plan[1].num_bytes == 400


def test_a_model_without_tensors_needs_no_bucket() -> None:
    assert plan_buckets(make_manifest([], bucket_bytes=64)) == ()


def test_a_manifest_is_named_by_all_that_it_says() -> None:
    hashes = {
        make_manifest([spec("a", 4)], bucket_bytes=64).hash,
        make_manifest([spec("b", 4)], bucket_bytes=64).hash,
        make_manifest([spec("a", 2, 2)], bucket_bytes=64).hash,
        make_manifest([spec("a", 4, dtype=protos.DTYPE_BFLOAT16)], bucket_bytes=64).hash,
        make_manifest([spec("a", 4)], bucket_bytes=128).hash,
    }
    assert len(hashes) == 5
    assert make_manifest([spec("a", 4)], bucket_bytes=64).hash in hashes


SPECS = st.lists(st.tuples(st.lists(st.integers(0, 7), max_size=3), st.sampled_from(sorted(NUMPY_DTYPES))), max_size=12)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(SPECS, st.integers(1, 300))
def test_every_tensor_lies_once_aligned_and_apart(tensors: list[tuple[list[int], int]], bucket_bytes: int) -> None:
    specs = [spec(str(index), *shape, dtype=dtype) for index, (shape, dtype) in enumerate(tensors)]
    manifest = make_manifest(specs, bucket_bytes=bucket_bytes)
    plan = plan_buckets(protos.Manifest.FromString(manifest.SerializeToString()))
    assert plan == plan_buckets(manifest)
    slots = [slot for bucket in plan for slot in bucket.slots]
    assert [slot.name for slot in slots] == [one.name for one in specs]
    for bucket in plan:
        end = 0
        for slot in bucket.slots:
            assert slot.offset % ALIGNMENT_BYTES == 0 and slot.offset >= end
            assert slot.num_bytes == math.prod(slot.shape) * NUMPY_DTYPES[slot.dtype].itemsize
            end = slot.offset + slot.num_bytes
        assert end <= bucket.num_bytes and bucket.num_bytes % 8 == 0
        assert len(bucket.slots) == 1 or end <= bucket_bytes


# Checksums.


def random_bytes(seed: int, num_words: int) -> Words:
    return np.random.default_rng(seed).integers(0, 256, 8 * num_words, dtype=np.uint8)


def test_the_checksum_of_known_words() -> None:
    words = np.array([1, 2], np.uint64)
    odd = 0x9E3779B97F4A7C15
    assert checksum(words.view(np.uint8)) == (1 * (odd | 1) + 2 * (2 * odd | 1)) % 2**64
    assert checksum(np.zeros(0, np.uint8)) == 0


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 10**6))
def test_a_flipped_bit_is_noticed(seed: int, num_words: int, at: int) -> None:
    data = random_bytes(seed, num_words)
    before = checksum(data)
    data[at % data.size] ^= 1 << (at % 8)
    assert checksum(data) != before


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 40), st.integers(0, 10**6), st.integers(0, 10**6))
def test_two_swapped_words_are_noticed(seed: int, num_words: int, one: int, other: int) -> None:
    data = random_bytes(seed, num_words)
    before = checksum(data)
    words = data.view(np.uint64)
    one, other = one % num_words, other % num_words
    words[[one, other]] = words[[other, one]]
    assert (checksum(data) != before) == (words[one] != words[other])


@pytest.mark.parametrize("shift", [8, 16, 64])
def test_a_shifted_range_is_noticed(shift: int) -> None:
    data = random_bytes(1, 64)
    assert checksum(np.roll(data, shift)) != checksum(data)


def test_a_torn_transfer_is_noticed() -> None:
    data = random_bytes(2, 64)
    torn = data.copy()
    torn[256:] = 0
    assert checksum(torn) != checksum(data)


def test_weights_are_named_by_manifest_and_every_sum_in_order() -> None:
    buckets = [random_bytes(seed, 4) for seed in range(2)]
    sums = [checksum(bucket) for bucket in buckets]
    names = {
        weights_hash("m", sums),
        weights_hash("m", sums[::-1]),
        weights_hash("n", sums),
        weights_hash("m", sums[:1]),
    }
    assert len(names) == 4
    assert all(len(name) == 64 for name in names)
