"""Send a version out: parameters are copied into flat buckets, then broadcast while the next step may already run."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from protos import Manifest, Rendezvous, SharedBuffer, TensorSpec
from protos.buckets import make_manifest, plan_buckets, weights_hash
from protos.groups import Group, open_group
from protos.ipc import share
from protos.meeting import host_store
from protos.tensors import WIRE_DTYPES, checksums, make_buffers, named_views

CPU = torch.device("cpu")


class Outgoing:
    """The buckets of a model, on its own device. `pack` fills them; they may be sent until the next `pack`.

    dtype: what floating point parameters are sent as; None sends them as they are.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], *, bucket_bytes: int, dtype: torch.dtype | None = None
    ) -> None:
        self._parameters = list(parameters)
        specs = [
            TensorSpec(name=name, dtype=WIRE_DTYPES[dtype or tensor.dtype], shape=tensor.shape)
            for name, tensor in self._parameters
        ]
        self.device = self._parameters[0][1].device
        self.manifest: Manifest = make_manifest(specs, bucket_bytes=bucket_bytes)
        self.plan = plan_buckets(self.manifest)
        self.buffers = make_buffers(self.plan, device=self.device)
        self.checksums: list[int] = []
        self._views = [tensor for _, tensor in named_views(self.plan, self.buffers)]
        self._on_host: list[Tensor] | None = None
        self._shared: list[SharedBuffer] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.plan)

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the parameters as they are now into the buckets. Shards are gathered, one parameter at a time."""
        whole = [tensor for _, tensor in self._parameters]
        if any(hasattr(tensor, "full_tensor") for tensor in whole):
            for place, tensor in zip(self._views, whole, strict=True):
                place.copy_(gathered(tensor))
        else:
            torch._foreach_copy_(self._views, whole)
        self.checksums = checksums(self.buffers)
        self._on_host = None

    def named_views(self) -> dict[str, Tensor]:
        """The packed parameters by name."""
        return dict(named_views(self.plan, self.buffers))

    def on_host(self) -> list[Tensor]:
        """The packed buckets in host memory, for transports that do not reach a GPU."""
        if self.device == CPU:
            return self.buffers
        if self._on_host is None:
            self._on_host = [buffer.to(CPU) for buffer in self.buffers]
        return self._on_host

    def shared(self) -> list[SharedBuffer]:
        """Handles to the buckets for another process on the same GPU; the same ones push after push."""
        if self._shared is None:
            self._shared = share(self.buffers)
        return self._shared

    def hash(self) -> str:
        """Names the packed parameters; a receiver computes the same."""
        return weights_hash(self.manifest.hash, self.checksums)

    def write(self, path: Path) -> None:
        """Write the packed parameters as safetensors; the file appears whole or not at all."""
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        save_file({name: view.contiguous() for name, view in named_views(self.plan, self.on_host())}, scratch)
        scratch.replace(path)


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a sharded parameter (a collective over the trainer's ranks), or the parameter itself."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


@dataclass(frozen=True, slots=True)
class Receiving:
    """A rollout server as part of a group: who it is, and how many ranks it takes."""

    server: str
    receivers: int = 1


@dataclass(slots=True)
class Crew:
    """The servers of one broadcast. Rank 0 is ours; the ranks of a server follow each other."""

    kind: str
    members: tuple[Receiving, ...]
    rendezvous: Rendezvous
    group: Group | None = field(default=None, repr=False)

    def place(self, server: str) -> Rendezvous:
        """Where a server meets us, with the rank of its first receiver."""
        rank = 1
        for member in self.members:
            if member.server == server:
                break
            rank += member.receivers
        found = Rendezvous(rank=rank)
        found.MergeFrom(self.rendezvous)
        return found


class Broadcaster:
    """Rank 0 of the groups of one trainer life: one store, and a group for each crew, kept from push to push."""

    def __init__(self, *, host: str, incarnation: int, device: torch.device = CPU) -> None:
        self.host = host
        self.incarnation = incarnation
        self.device = device
        self._store = host_store(host)
        self._sequence = 0
        self._crews: dict[tuple[str, tuple[Receiving, ...]], Crew] = {}

    def crew(self, kind: str, members: Sequence[Receiving]) -> Crew:
        """The crew of these servers; the known one where it is the same as before. kind: gloo or nccl."""
        key = (kind, tuple(members))
        if key not in self._crews:
            for other in [other for other in self._crews.values() if set(other.members) & set(members)]:
                self.forget(other)  # a server is in one group at a time
            self._sequence += 1
            place = Rendezvous(
                host=self.host,
                port=self._store.port,
                group_id=f"{self.incarnation}.{self._sequence}",
                world_size=1 + sum(member.receivers for member in members),
                nonce=secrets.token_hex(16),
            )
            self._crews[key] = Crew(kind, tuple(members), place)
        return self._crews[key]

    def forget(self, crew: Crew) -> None:
        """After a failure a group is in an unknown state: what is under way ends, the next push makes a new one."""
        self._crews.pop((crew.kind, crew.members), None)
        if crew.group is not None:
            crew.group.abort()

    def keep_only(self, servers: Iterable[str]) -> None:
        """Let go of the groups that others than these servers belong to."""
        present = set(servers)
        for crew in list(self._crews.values()):
            if not {member.server for member in crew.members} <= present:
                self.forget(crew)

    def send(self, crew: Crew, buffers: Sequence[Tensor], *, deadline_seconds: float) -> Future[None]:
        """Broadcast on a daemon thread: a collective cannot be interrupted, but whoever waits for it can give up."""
        return on_daemon_thread(lambda: self._send(crew, buffers, deadline_seconds), name="push")

    def _send(self, crew: Crew, buffers: Sequence[Tensor], deadline_seconds: float) -> None:
        if crew.group is None:
            crew.group = open_group(
                crew.kind,
                self._store,
                nonce=crew.rendezvous.nonce,
                rank=0,
                world_size=crew.rendezvous.world_size,
                host=self.host,
                device=self.device,
                deadline_seconds=deadline_seconds,
            )
        crew.group.broadcast(buffers, deadline_seconds=deadline_seconds)


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
