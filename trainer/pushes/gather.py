"""The parameters of one bucket on their way into a flat buffer; shards of FSDP2 are gathered from all trainer ranks.

A gather is a collective: every rank runs the same fills in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from protos.buckets import ALIGNMENT_BYTES, Bucket
from protos.tensors import view
from trainer.adapters.merging import LowRank, Weight

# The older name is deprecated from torch 2.13 on, the newer one is missing before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GatherFailed(RuntimeError):
    """A rank of the trainer itself is gone: no rollout server is to blame, and no other push can help."""


class Fill:
    """Fills one bucket: in `place`, or where that is None in memory that is taken for the time."""

    def __init__(
        self, bucket: Bucket, tensors: Sequence[Weight], place: Tensor | None, *, device: torch.device
    ) -> None:
        self._device = device
        self._bucket = bucket
        self._tensors = tensors
        self._place = None if place is None else place[: bucket.num_bytes]
        self._views = [] if self._place is None else [view(self._place, slot) for slot in bucket.slots]

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The filled buffer, flat uint8. GatherFailed where a rank is gone."""
        buffer, views = self._place, self._views
        if buffer is None:
            buffer = torch.empty(self._bucket.num_bytes, dtype=torch.uint8, device=self._device)
            views = [view(buffer, slot) for slot in self._bucket.slots]
        for gap in gaps(self._bucket):
            buffer[gap].zero_()
        try:
            gather_into(views, self._tensors)
        except RuntimeError as error:
            raise GatherFailed(f"{type(error).__name__}: {str(error)[:300]}") from error
        return buffer


def gaps(bucket: Bucket) -> Iterator[slice]:
    """The bytes between the slots: they count in the checksum as zeros."""
    ends = [slot.offset for slot in bucket.slots[1:]] + [bucket.num_bytes]
    for slot, end in zip(bucket.slots, ends, strict=True):
        if slot.offset + slot.num_bytes < end:
            yield slice(slot.offset + slot.num_bytes, end)


def gather_into(places: Sequence[Tensor], tensors: Sequence[Weight]) -> None:
    """Copy whole parameters into `places` of the same shapes, cast to their dtypes; sums are made there.

    Even shards of one mesh travel in one collective, in the dtype of their places; others one by one.
    """
    whole: list[tuple[Tensor, Tensor]] = []
    together: dict[DeviceMesh, list[tuple[Tensor, DTensor]]] = {}
    for place, tensor in zip(places, tensors, strict=True):
        if isinstance(tensor, LowRank):
            tensor.into(place)
        elif not isinstance(tensor, DTensor):
            whole.append((place, tensor))
        elif is_even(tensor):
            together.setdefault(tensor.device_mesh, []).append((place, tensor))
        else:
            place.copy_(tensor.full_tensor())
    if whole:
        torch._foreach_copy_([place for place, _ in whole], [tensor for _, tensor in whole])
    for mesh, pairs in together.items():
        _gather_together(mesh, [place for place, _ in pairs], [tensor.to_local() for _, tensor in pairs])


def is_even(tensor: DTensor) -> bool:
    """Whether each rank of one dimension holds equally many rows."""
    mesh = tensor.device_mesh
    return mesh.ndim == 1 and tensor.placements == (Shard(0),) and tensor.shape[0] % mesh.size() == 0


def _gather_together(mesh: DeviceMesh, places: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
    """One row of bytes holds the shards of one rank; rank r's rows of a parameter are its r-th part."""
    world = mesh.size()
    ranges: list[slice] = []
    end = 0
    for place in places:
        num_bytes = place.numel() * place.element_size() // world
        ranges.append(slice(end, end + num_bytes))
        end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    mine = torch.empty(end, dtype=torch.uint8, device=places[0].device)
    rows = torch.empty(world, end, dtype=torch.uint8, device=places[0].device)
    parts = zip(ranges, places, shards, strict=True)
    torch._foreach_copy_([mine[at].view(place.dtype).view(shard.shape) for at, place, shard in parts], list(shards))
    _all_gather(rows.view(-1), mine, group=mesh.get_group(0))
    parts = zip(ranges, places, shards, strict=True)
    torch._foreach_copy_(
        [place.view(world, *shard.shape) for place, shard in zip(places, shards, strict=True)],
        [rows[:, at].view(place.dtype).view(world, *shard.shape) for at, place, shard in parts],
    )
