"""A weight that is a sum: the frozen base and a product of low rank, made when somebody wants it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from protos.lowrank import add_low_rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowRank:
    """base + scaling * b @ a; base [out, in], a [rank, in], b [out, rank]. With shards a collective."""

    base: Tensor
    a: Tensor
    b: Tensor
    scaling: float

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    def into(self, place: Tensor) -> None:
        """Write the sum, computed in float32, cast to the dtype of `place`."""
        add_low_rank(place, whole(self.base), whole(self.a), whole(self.b), scaling=self.scaling)


Weight = Tensor | LowRank


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all shards of it on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(weight: Weight) -> bool:
    return isinstance(weight.base if isinstance(weight, LowRank) else weight, DTensor)
