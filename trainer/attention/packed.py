"""Attention of packed sequences, as transformers' attention implementation "packed"; importing this file registers it.

The sequences of a micro-batch stand behind each other in one row [1, T]; `cu_seq_lens_q` (int32 [S + 1], from 0 to T)
says where each begins. Transformers hands the arguments of `sequence_arguments` from a model's body to every layer. On
CUDA in half precision PyTorch's own variable-length kernel reads the row as it lies; anywhere else, and where long
sequences have a faster kernel, they are padded in blocks of like lengths, inside attention only. Without
`cu_seq_lens_q` it is transformers' sdpa, mask and all.

Shapes: B rows, T tokens, S sequences, H query heads, N key-value heads, D features.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.attention.padded import causal_attention, padded_attention
from trainer.attention.varlen import kernel_takes, varlen_attention

NAME = "packed"
LENGTH_GRAIN = 128
"""Longest lengths are rounded up to this, so that a compiled layer sees few of them; kernels only read the bound."""
LAYER_TYPES = {"full_attention", "sliding_attention"}


def sequence_arguments(
    cu_seqlens_S1: Tensor, max_length: int, *, attn_implementation: str
) -> dict[str, Tensor | int | bool]:
    """What a model's body takes beside input_ids [1, T] and position_ids [1, T] (from 0 in each sequence).

    Every implementation that the trainer offers then keeps sequences apart: "packed" and the flash ones by these
    lengths, the others by a mask that transformers makes of the position_ids.
    """
    longest = -(-max_length // LENGTH_GRAIN) * LENGTH_GRAIN
    arguments: dict[str, Tensor | int | bool] = {
        "cu_seq_lens_q": cu_seqlens_S1,
        "cu_seq_lens_k": cu_seqlens_S1,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }
    return arguments | ({"attention_mask": _no_mask(cu_seqlens_S1.device)} if attn_implementation == NAME else {})


def check_packable(model: nn.Module) -> None:
    """Raises ValueError for a model whose packed sequences would see each other."""
    config = cast(PreTrainedModel, model).config.get_text_config()
    foreign = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if getattr(model, "_is_stateful", False) or foreign:
        kinds = ", ".join(sorted(foreign)) or "recurrent"
        raise ValueError(f"{type(model).__name__} has {kinds} layers, which do not keep packed sequences apart")
    if config._attn_implementation == NAME and not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{type(model).__name__} takes no attention function: set trainer.attn_implementation=eager")


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, None]:
    """The attention function of transformers: query [B, H, T, D], key and value [B, N, T, D] -> [B, T, H, D].

    Raises ValueError for what the kernels cannot do, and where sequences are packed but nobody said where they begin.
    """
    _refuse_unknown(module, kwargs)
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if not isinstance(cu_seqlens, Tensor):
        if attention_mask is not None and attention_mask.numel() == 0:
            raise ValueError(f"packed sequences came to {type(module).__name__} without cu_seq_lens_q")
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return plain
    if len(query) != 1 or query.shape[2] != key.shape[2] or not _is_causal(module, kwargs):
        raise ValueError("packed sequences stand in one row, without a cache, and look only back")
    scale, window, longest = kwargs.get("scaling"), kwargs.get("sliding_window"), kwargs.get("max_length_q")
    assert scale is None or isinstance(scale, float)
    assert window is None or isinstance(window, int)
    if len(cu_seqlens) == 2 and (window is None or window >= query.shape[2]):
        return causal_attention(query, key, value, scale=scale, window=None).transpose(1, 2), None
    query_THD, key_TND, value_TND = (states[0].transpose(0, 1) for states in (query, key, value))
    if isinstance(longest, int) and kernel_takes(query, value, longest, window):
        mixed_THD = varlen_attention(query_THD, key_TND, value_TND, cu_seqlens, longest, scale=scale, window=window)
    else:
        mixed_THD = padded_attention(query_THD, key_TND, value_TND, cu_seqlens, scale=scale, window=window)
    return mixed_THD[None], None


def packed_mask(**kwargs: Any) -> Tensor | None:
    """The mask function of transformers: sdpa's, but none where its caller found several sequences in the row."""
    whole = kwargs["attention_mask"] is None and kwargs["q_length"] == kwargs["kv_length"] > 1
    if whole and not kwargs["allow_is_causal_skip"] and not kwargs["use_vmap"]:
        return _no_mask(kwargs["device"])
    mask: Tensor | None = sdpa_mask(**kwargs)
    return mask


def _no_mask(device: torch.device) -> Tensor:
    """Transformers passes a mask of four dimensions on as it is, and does not look for packed sequences itself, for
    which it would wait for the device."""
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def _is_causal(module: nn.Module, kwargs: Mapping[str, object]) -> bool:
    told = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if told is None else told)


def _refuse_unknown(module: nn.Module, kwargs: Mapping[str, object]) -> None:
    for name in ("softcap", "s_aux", "position_bias", "dropout"):
        if isinstance(given := kwargs.get(name), Tensor) or given:
            raise ValueError(
                f"attn_implementation={NAME!r} has no {name}, which {type(module).__name__} needs: set"
                " trainer.attn_implementation=eager"
            )


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)
