"""Receive a new version while generation goes on: into staging buffers, verified, handed to the engine at the swap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from protos import Manifest, Rendezvous
from protos.buckets import Bucket, Slot, checksum, plan_buckets
from protos.generated.trajectory_pb2 import DType
from protos.gloo import address_towards, broadcast, join_store, open_group

TORCH_DTYPES: dict[int, torch.dtype] = {
    DType.DTYPE_FLOAT32: torch.float32,
    DType.DTYPE_FLOAT16: torch.float16,
    DType.DTYPE_BFLOAT16: torch.bfloat16,
    DType.DTYPE_FLOAT64: torch.float64,
    DType.DTYPE_INT32: torch.int32,
    DType.DTYPE_INT64: torch.int64,
    DType.DTYPE_UINT8: torch.uint8,
}


class Incoming:
    """One version on its way in. The transfer runs on a daemon thread; the control calls stay free to abort it."""

    def __init__(
        self, version: int, manifest_hash: str, plan: Sequence[Bucket], fill: Callable[[list[Tensor]], None]
    ) -> None:
        self.version = version
        self.manifest_hash = manifest_hash
        self.plan = plan
        self.buffers = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in plan]
        self.arrived: Future[None] = Future()
        self.arrived.set_running_or_notify_cancel()  # who gives up waiting does not cancel it
        threading.Thread(target=self._receive, args=(fill,), name=f"push-{version}", daemon=True).start()

    def _receive(self, fill: Callable[[list[Tensor]], None]) -> None:
        try:
            fill(self.buffers)
        except Exception as error:  # handed to whoever commits: the thread has nobody else to tell
            self.arrived.set_exception(error)
        else:
            self.arrived.set_result(None)

    def mismatches(self, expected: Sequence[int]) -> list[int]:
        """Indices of the buckets whose checksum is not the sender's."""
        found = [checksum(buffer.numpy()) for buffer in self.buffers]
        if len(found) != len(expected):
            return list(range(max(len(found), len(expected))))
        return [index for index, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views into the buffers: (name, tensor) in the order of the manifest."""
        for bucket, buffer in zip(self.plan, self.buffers, strict=True):
            for slot in bucket.slots:
                yield slot.name, view(buffer, slot)


class Receiver:
    """The receiving end of a server: remembers plans by manifest hash and the group of the current membership."""

    def __init__(self) -> None:
        self._plans: dict[str, tuple[Bucket, ...]] = {}
        self._group_id = ""
        self._group: ProcessGroupGloo | None = None

    def knows(self, manifest: Manifest) -> bool:
        """Whether the plan is here; a manifest without tensors names one that was sent before."""
        if manifest.hash not in self._plans and manifest.tensors:
            self._plans[manifest.hash] = plan_buckets(manifest)
        return manifest.hash in self._plans

    def from_broadcast(
        self, version: int, manifest: Manifest, rendezvous: Rendezvous, *, deadline_seconds: float
    ) -> Incoming:
        """Begin to receive from rank 0 of a Gloo group; a known group is used again."""

        def fill(buffers: list[Tensor]) -> None:
            group = self._join(rendezvous, deadline_seconds=deadline_seconds)
            for buffer in buffers:
                broadcast(group, buffer)

        return Incoming(version, manifest.hash, self._plans[manifest.hash], fill)

    def from_disk(self, version: int, manifest: Manifest, path: Path) -> Incoming:
        """Begin to read a safetensors file into the same buckets."""
        plan = self._plans[manifest.hash]

        def fill(buffers: list[Tensor]) -> None:
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                for bucket, buffer in zip(plan, buffers, strict=True):
                    for slot in bucket.slots:
                        view(buffer, slot).copy_(file.get_tensor(slot.name))

        return Incoming(version, manifest.hash, plan, fill)

    def forget_group(self) -> None:
        """After an abort the group is in an unknown state: the next push comes with a new one."""
        self._group_id, self._group = "", None

    def _join(self, rendezvous: Rendezvous, *, deadline_seconds: float) -> ProcessGroupGloo:
        if rendezvous.group_id == self._group_id and self._group is not None:
            return self._group
        store = join_store(rendezvous.host, rendezvous.port, deadline_seconds=deadline_seconds)
        group = open_group(
            store,
            nonce=rendezvous.nonce,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            host=address_towards(rendezvous.host, rendezvous.port),
            deadline_seconds=deadline_seconds,
        )
        self._group_id, self._group = rendezvous.group_id, group
        return group


def view(buffer: Tensor, slot: Slot) -> Tensor:
    """The tensor that lies in `slot` of a bucket, without a copy."""
    flat = buffer[slot.offset : slot.offset + slot.num_bytes]
    return flat.view(TORCH_DTYPES[slot.dtype]).view(slot.shape)
