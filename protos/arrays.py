"""numpy <-> Array: dtype, shape and raw bytes, checked so that hostile sizes cannot reach an allocation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from protos.generated.trajectory_pb2 import Array, DType

NUMPY_DTYPES: dict[int, np.dtype[Any]] = {
    DType.DTYPE_INT32: np.dtype("<i4"),
    DType.DTYPE_INT64: np.dtype("<i8"),
    DType.DTYPE_FLOAT32: np.dtype("<f4"),
    DType.DTYPE_FLOAT64: np.dtype("<f8"),
    DType.DTYPE_UINT8: np.dtype("u1"),
    DType.DTYPE_BFLOAT16: np.dtype("<u2"),  # numpy has no bfloat16: the bits travel as they are
    DType.DTYPE_FLOAT16: np.dtype("<f2"),
}
WIRE_DTYPES = {dtype: wire for wire, dtype in NUMPY_DTYPES.items()}


def to_array(values: npt.NDArray[Any]) -> Array:
    """Pack an array of any shape; ValueError for a dtype that the wire does not know."""
    wire = WIRE_DTYPES.get(values.dtype)
    if wire is None:
        raise ValueError(f"dtype {values.dtype} does not travel; known: {', '.join(map(str, WIRE_DTYPES))}")
    return Array(dtype=wire, shape=values.shape, data=values.tobytes())  # type: ignore[arg-type]


def from_array(array: Array) -> npt.NDArray[Any]:
    """View the bytes of `array` as a read-only numpy array; ValueError where dtype, shape and bytes disagree."""
    dtype = NUMPY_DTYPES.get(array.dtype)
    if dtype is None:
        raise ValueError(f"unknown array dtype {array.dtype}")
    expected = math.prod(array.shape) * dtype.itemsize
    if expected != len(array.data):
        raise ValueError(f"array of shape {list(array.shape)} needs {expected} bytes, {len(array.data)} came")
    values = np.frombuffer(array.data, dtype=dtype)
    return values if len(array.shape) == 1 else values.reshape(array.shape)
