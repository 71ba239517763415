"""What a push of a trained model brings: whole weights, those with an adapter merged, or the adapter alone."""

from __future__ import annotations

import torch
from torch import nn

from protos import LowRankUpdate
from protos.lowrank import fingerprints
from protos.tensors import WIRE_DTYPES
from trainer.adapters.lora import adapter_weights, low_rank_weights, pushed_weights
from trainer.adapters.merging import whole
from trainer.configs.lora import LoraConfig
from trainer.pushes.outgoing import Outgoing


def outgoing_of(
    model: nn.Module, lora: LoraConfig | None, *, bucket_bytes: int, dtype: torch.dtype | None, streamed: bool
) -> Outgoing:
    """The buckets for a model, with or without an adapter. dtype: of the weights as the engines take them.

    With shards every trainer rank makes one, at the same time.
    """
    if lora is None or lora.push == "merged":
        return Outgoing(pushed_weights(model).items(), bucket_bytes=bucket_bytes, dtype=dtype, streamed=streamed)
    updates = low_rank_updates(model, dtype=dtype)
    factors = adapter_weights(model).items()
    return Outgoing(factors, bucket_bytes=bucket_bytes, streamed=streamed, low_rank=updates)


def low_rank_updates(model: nn.Module, *, dtype: torch.dtype | None) -> list[LowRankUpdate]:
    """How the receivers make the adapted weights; `dtype` None: in that of the base."""
    sums = low_rank_weights(model)
    checksums = fingerprints(whole(one.base) for one in sums.values())
    return [
        LowRankUpdate(
            name=name,
            a=f"{name.removesuffix('.weight')}.lora_A.weight",
            b=f"{name.removesuffix('.weight')}.lora_B.weight",
            scaling=one.scaling,
            dtype=WIRE_DTYPES[dtype or one.dtype],
            base_dtype=WIRE_DTYPES[one.dtype],
            base_checksum=checksum,
        )
        for (name, one), checksum in zip(sums.items(), checksums, strict=True)
    ]
