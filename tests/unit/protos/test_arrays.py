"""Arrays on the wire: what goes in comes out, and what lies about its size is refused before anything is allocated."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import protos
from protos.arrays import NUMPY_DTYPES, from_array, to_array

DTYPES = sorted(NUMPY_DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=[str(NUMPY_DTYPES[dtype]) for dtype in DTYPES])
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (2, 3), (2, 0, 3), ()])
def test_every_dtype_and_shape_comes_back(dtype: int, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(NUMPY_DTYPES[dtype])
    sent = protos.Array.FromString(to_array(values).SerializeToString())
    assert sent.dtype == dtype
    found = from_array(sent)
    assert found.dtype == values.dtype and found.shape == values.shape
    np.testing.assert_array_equal(found, values)


def test_every_dtype_of_the_wire_has_a_numpy_one() -> None:
    assert set(DTYPES) == set(protos.DType.values()) - {protos.DTYPE_UNSPECIFIED}


@settings(derandomize=True, max_examples=50, deadline=None)
@given(hnp.arrays(dtype=st.sampled_from(["<f4", "<i4", "u1", "<f8"]), shape=hnp.array_shapes(max_dims=3, max_side=5)))
def test_any_array_comes_back_bit_for_bit(values: npt.NDArray[Any]) -> None:
    assert from_array(to_array(values)).tobytes() == values.tobytes()


def test_a_view_that_is_not_contiguous_is_packed_in_its_own_order() -> None:
    values = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(from_array(to_array(values)), values)


def test_the_bytes_are_little_endian() -> None:
    assert to_array(np.array([1], np.int32)).data == b"\x01\x00\x00\x00"


def test_what_came_cannot_be_written_to() -> None:
    found = from_array(to_array(np.zeros(3, np.float32)))
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1.0


@pytest.mark.parametrize("dtype", ["complex64", "bool", "U3", ">f4"])
def test_a_dtype_that_does_not_travel_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match="does not travel"):
        to_array(np.zeros(2, dtype))


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes", "message"),
    [
        (protos.DTYPE_INT32, [2**32 - 1, 2**32 - 1, 2**32 - 1], 16, r"needs \d{30} bytes, 16 came"),
        (protos.DTYPE_INT32, [4], 15, "needs 16 bytes, 15 came"),
        (protos.DTYPE_INT32, [4], 17, "needs 16 bytes, 17 came"),
        (protos.DTYPE_INT32, [0], 4, "needs 0 bytes, 4 came"),
        (protos.DTYPE_FLOAT64, [2, 2], 16, "needs 32 bytes, 16 came"),
        (protos.DTYPE_UINT8, [], 0, "needs 1 bytes, 0 came"),
        (protos.DTYPE_UNSPECIFIED, [4], 16, "unknown array dtype 0"),
        (99, [4], 16, "unknown array dtype 99"),
    ],
)
def test_an_array_that_lies_is_refused(dtype: int, shape: list[int], num_bytes: int, message: str) -> None:
    array = protos.Array(dtype=dtype, shape=shape, data=bytes(num_bytes))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        from_array(array)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(0, 8), st.lists(st.integers(0, 2**32 - 1), max_size=6), st.binary(max_size=64))
def test_no_message_makes_more_than_its_bytes(dtype: int, shape: list[int], data: bytes) -> None:
    try:
        found = from_array(protos.Array(dtype=dtype, shape=shape, data=data))  # type: ignore[arg-type]
    except ValueError:
        return
    assert found.nbytes == len(data)
