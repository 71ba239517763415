"""Send a version out: parameters are copied into flat buckets, then broadcast while the next step may already run."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from protos import Manifest, Rendezvous, TensorSpec
from protos.buckets import checksums, make_manifest, plan_buckets, weights_hash
from protos.generated.trajectory_pb2 import DType
from protos.gloo import broadcast, host_store, open_group

WIRE_DTYPES = {
    torch.float32: DType.DTYPE_FLOAT32,
    torch.float16: DType.DTYPE_FLOAT16,
    torch.bfloat16: DType.DTYPE_BFLOAT16,
    torch.float64: DType.DTYPE_FLOAT64,
}


class Outgoing:
    """The buckets of a model. `pack` fills them; they may be sent until the next `pack`."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> None:
        self._parameters = list(parameters)
        specs = [
            TensorSpec(name=name, dtype=WIRE_DTYPES[tensor.dtype], shape=tensor.shape)
            for name, tensor in self._parameters
        ]
        self.manifest: Manifest = make_manifest(specs, bucket_bytes=bucket_bytes)
        self.plan = plan_buckets(self.manifest)
        self.buffers = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in self.plan]
        self.checksums: list[int] = []
        self._views = self._make_views()

    def _make_views(self) -> list[Tensor]:
        tensors = dict(self._parameters)
        views = []
        for bucket, buffer in zip(self.plan, self.buffers, strict=True):
            for slot in bucket.slots:
                flat = buffer[slot.offset : slot.offset + slot.num_bytes]
                views.append(flat.view(tensors[slot.name].dtype).view(slot.shape))
        return views

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.plan)

    def pack(self) -> None:
        """Copy the parameters as they are now into the buckets."""
        with torch.no_grad():
            for view, (_, tensor) in zip(self._views, self._parameters, strict=True):
                view.copy_(tensor)
        self.checksums = checksums([buffer.numpy() for buffer in self.buffers])

    def named_views(self) -> dict[str, Tensor]:
        """The packed parameters by name."""
        return {name: view for view, (name, _) in zip(self._views, self._parameters, strict=True)}

    def hash(self) -> str:
        """Names the packed parameters; a receiver computes the same."""
        return weights_hash(self.manifest.hash, self.checksums)

    def write(self, path: Path) -> None:
        """Write the packed parameters as safetensors; the file appears whole or not at all."""
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        save_file({name: view.contiguous() for name, view in self.named_views().items()}, scratch)
        scratch.replace(path)


class Broadcaster:
    """Rank 0 of the Gloo groups of one trainer life: one store, a new group whenever the membership changes."""

    def __init__(self, *, host: str, incarnation: int) -> None:
        self.host = host
        self.incarnation = incarnation
        self._store = host_store(host)
        self._sequence = 0
        self._members: tuple[str, ...] = ()
        self._rendezvous: Rendezvous | None = None
        self._group: ProcessGroupGloo | None = None

    def rendezvous(self, members: tuple[str, ...]) -> list[Rendezvous]:
        """Where each member meets us, in order of rank; the known group where the membership is the same."""
        if members != self._members or self._rendezvous is None:
            self._sequence += 1
            self._members, self._group = members, None
            self._rendezvous = Rendezvous(
                host=self.host,
                port=self._store.port,
                group_id=f"{self.incarnation}.{self._sequence}",
                world_size=len(members) + 1,
                nonce=secrets.token_hex(16),
            )
        found = []
        for rank in range(1, len(members) + 1):
            one = Rendezvous()
            one.CopyFrom(self._rendezvous)
            one.rank = rank
            found.append(one)
        return found

    def forget(self) -> None:
        """After a failure the group is in an unknown state: the next push makes a new one."""
        self._rendezvous, self._group, self._members = None, None, ()

    def send(self, buffers: list[Tensor], *, deadline_seconds: float) -> Future[None]:
        """Broadcast on a daemon thread: a collective cannot be interrupted, but whoever waits for it can give up."""
        return on_daemon_thread(lambda: self._send(buffers, deadline_seconds), name="push")

    def _send(self, buffers: list[Tensor], deadline_seconds: float) -> None:
        rendezvous = self._rendezvous
        assert rendezvous is not None
        group = self._group
        if group is None:
            group = open_group(
                self._store,
                nonce=rendezvous.nonce,
                rank=0,
                world_size=rendezvous.world_size,
                host=self.host,
                deadline_seconds=deadline_seconds,
            )
            if rendezvous is self._rendezvous:
                self._group = group
        for buffer in buffers:
            broadcast(group, buffer)


def on_daemon_thread(function: Callable[[], None], *, name: str) -> Future[None]:
    """Run `function` on a thread that does not keep the process alive."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # who gives up waiting does not cancel it: the thread still says how it ended

    def run() -> None:
        try:
            function()
        except Exception as error:  # handed to whoever waits
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
