"""Memory of one GPU that two processes see: how a push reaches an engine on the trainer's own card. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from protos.generated.weights_pb2 import SharedBuffer


def share(buffers: Sequence[Tensor]) -> list[SharedBuffer]:
    """Handles under which another process on this machine maps these CUDA buffers; it must not outlive them."""
    return [_share(buffer) for buffer in buffers]


def _share(buffer: Tensor) -> SharedBuffer:
    _, handle, size, offset, counter, counter_offset, event, event_sync = buffer.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return SharedBuffer(
        gpu=gpu_of(buffer.device),
        handle=handle,
        num_bytes=size,
        offset=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        event_sync=event_sync,
    )


def open_shared(shared: Iterable[SharedBuffer]) -> list[Tensor]:
    """The buffers behind the handles, as flat uint8 tensors on this process's device of the same GPU."""
    here = {gpu_of(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    return [_open(one, index=here[one.gpu]) for one in shared]


def _open(one: SharedBuffer, *, index: int) -> Tensor:
    torch.cuda._lazy_init()  # type: ignore[no-untyped-call]
    storage = torch.UntypedStorage._new_shared_cuda(
        index,
        one.handle,
        one.num_bytes,
        one.offset,
        one.counter,
        one.counter_offset,
        one.event,
        one.event_sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)


def gpu_of(device: torch.device) -> str:
    """Names the card, whatever index a process has for it."""
    return str(torch.cuda.get_device_properties(device).uuid)
