"""Who takes part in a step, and what they add up.

Every rank holds the whole batch on its CPU and prepares it for itself, which takes no exchange; it runs its own
micro-batches, and what those give is summed here.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

BUCKET_ELEMENTS = 2**25


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the trainer's."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """Over which the weights are sharded; None: they are whole, on every rank."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients of whole weights are summed; None: their own."""
    group: dist.ProcessGroup | None = None
    """For the exchanges below; None: the one of training."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def gradient_scale(self) -> int:
        """Losses are multiplied by it: FSDP2 takes the mean over ranks where the sum is meant."""
        return 1 if self.mesh is None else self.size

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Adds up the gradients of whole weights over all ranks, in place; those of shards are summed already."""
        if self.size == 1 or self.mesh is not None:
            return
        for part in _buckets(gradients):
            flat = torch.cat([gradient.flatten().to(self.reduce_dtype or gradient.dtype) for gradient in part])
            dist.all_reduce(flat)
            pieces = torch.split(flat, [gradient.numel() for gradient in part])
            torch._foreach_copy_(list(part), [piece.view_as(one) for piece, one in zip(pieces, part, strict=True)])

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Adds up CPU tensors over all ranks, in place; each rank gives the same shapes in the same order."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.group)

    def max_(self, tensor: Tensor) -> None:
        """The largest value of any rank, place by place of a CPU tensor."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives, by rank: anything that JSON holds (it comes back as JSON has it)."""
        if self.size == 1:
            return [value]
        own = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(own)
        dist.all_reduce(sizes, group=self.group)
        rows = [torch.zeros(int(sizes.max()), dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(rows, torch.cat([own, rows[0][len(own) :]]), group=self.group)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def total(self, value: Tensor) -> float:
        """Sum of one scalar over all ranks."""
        found = value.detach().to("cpu", torch.float64)
        self.sum_([found])
        return float(found)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """In order, of about BUCKET_ELEMENTS each and one dtype."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(one.numel() for one in bucket) >= BUCKET_ELEMENTS
        if bucket and (full or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


ALONE = Ranks()
