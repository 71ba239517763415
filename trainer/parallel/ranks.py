"""Who takes part in a step, and what they add up.

Every rank holds the whole batch on its CPU and prepares it for itself, which takes no exchange; it runs its own
micro-batches, and what those give is summed here.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the trainer's."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """Over which the weights are sharded; None: they are whole."""
    group: dist.ProcessGroup | None = None
    """For the exchanges below; None: the one of training."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

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


ALONE = Ranks()
