"""PyTorch's variable-length flash attention for packed sequences; no tensor is larger than its inputs.

Shapes: T packed tokens, H query heads, N key-value heads, D features.
"""

import inspect
from typing import Any, cast

import torch
from torch import Tensor

try:
    from torch.nn.attention import varlen
except ImportError:  # torch before 2.10
    varlen = None  # type: ignore[assignment]

_KNOWN = set(inspect.signature(varlen.varlen_attn).parameters) if varlen is not None else set()
HAS_KERNEL = {"scale", "window_size"} <= _KNOWN
"""Whether this torch (2.11 or newer) has a kernel with both."""
AMPERE, HOPPER = 8, 9
DENSE_TOKENS = 1024
"""From Hopper on cuDNN, which SDPA takes for sequences of one length, needs half the time of flash attention 2: 0.47 ms
beside 0.96 ms for 8,192 tokens of 16 heads of 128 on an H200. Shorter sequences do not gain what the gather costs."""
_GROUPS_HEADS = "enable_gqa" in _KNOWN


def kernel_takes(query: Tensor, value: Tensor, longest: int, window: int | None = None) -> bool:
    """Whether flash attention runs on such tensors (in half precision, on Ampere or newer), and nothing runs faster."""
    width, halves = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    if not (HAS_KERNEL and query.is_cuda and halves):
        return False
    fits = width == value.shape[-1] and width <= 256 and width % 8 == 0
    generation = _generation(query.device.index)
    dense = generation >= HOPPER and longest >= DENSE_TOKENS and (window is None or window >= longest)
    return fits and generation >= AMPERE and not dense


@torch.compiler.assume_constant_result
def _generation(index: int) -> int:
    return torch.cuda.get_device_properties(index).major


def varlen_attention(
    query_THD: Tensor,
    key_TND: Tensor,
    value_TND: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention within each sequence -> [T, H, D]. A token sees `window` tokens at most, itself included.

    `cu_seqlens` is int32 on the same device; no sequence is longer than `longest`.
    """
    groups = query_THD.shape[1] // key_TND.shape[1]
    if groups > 1 and not _GROUPS_HEADS:
        key_TND, value_TND = key_TND.repeat_interleave(groups, 1), value_TND.repeat_interleave(groups, 1)
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if _GROUPS_HEADS:
        options["enable_gqa"] = True
    mixed_THD = varlen.varlen_attn(query_THD, key_TND, value_TND, cu_seqlens, cu_seqlens, longest, longest, **options)
    return cast(Tensor, mixed_THD)
