"""What one rank holds of a tensor, and where in the whole that lies."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A block of a tensor, in host memory, shared with nothing."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    block: Tensor


def own_shards(tensors: Mapping[str, Tensor], *, leads: bool) -> dict[str, Shard]:
    """Copies of what this rank is to save: of equal blocks only one rank saves its own, and nobody an empty one.

    A tensor that is no DTensor is the same on all ranks, and saved by the one that `leads`.
    """
    found: dict[str, Shard] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            [chunk] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            if _is_first_replica(tensor) and (tensor.to_local().numel() or not tensor.numel()):
                found[name] = Shard(whole=(*tensor.shape,), offsets=(*chunk.offsets,), block=_copy(tensor.to_local()))
        elif leads:
            found[name] = Shard(whole=(*tensor.shape,), offsets=(0,) * tensor.ndim, block=_copy(tensor))
    return found


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    places = zip(coordinate, tensor.placements, strict=True)
    return all(index == 0 for index, placement in places if placement.is_replicate())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
