"""Receive a new version while generation goes on: into staging memory, verified, for the engine to take at the swap.

A `Receiver` runs in whatever process holds the model: the server's own, or an engine's workers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from protos import BeginPushRequest, Manifest, Rendezvous, SharedBuffer
from protos.buckets import Bucket, plan_buckets
from protos.generated.weights_pb2 import Transport
from protos.groups import Group, open_group
from protos.ipc import open_shared
from protos.meeting import address_towards, join_store
from protos.tensors import checksums, make_buffers, named_views, view
from rollout.engine import TransferFailed
from rollout.merged import Merged
from rollout.start_weights import StartWeights

logger = logging.getLogger(__name__)
JOIN_SECONDS = 2.0
CPU = torch.device("cpu")


class Incoming:
    """One version on its way in. The transfer runs on a daemon thread; the control calls stay free to abort it."""

    def __init__(self, version: int, receive: Callable[[], list[int]], *, deadline: float) -> None:
        self.version = version
        self.deadline = deadline
        self.arrived: Future[list[int]] = Future()
        self.arrived.set_running_or_notify_cancel()  # who gives up waiting does not cancel it
        self._ending = threading.Lock()
        self.thread = threading.Thread(target=self._run, args=(receive,), name=f"push-{version}", daemon=True)
        self.thread.start()

    def _run(self, receive: Callable[[], list[int]]) -> None:
        try:
            sums = receive()
        except Exception as error:  # handed to whoever waits: the thread has nobody else to tell
            self._end(partial(self.arrived.set_exception, error))
        else:
            self._end(lambda: self.arrived.set_result(sums))

    def abandon(self) -> None:
        """Whoever waits need not wait any more; a collective that cannot be interrupted ends later, unheard."""
        self._end(lambda: self.arrived.set_exception(RuntimeError("the push was aborted")))

    def _end(self, say: Callable[[], None]) -> None:
        with self._ending:
            if not self.arrived.done():
                say()


class Receiver:
    """Staging memory on `device`, the plan of the last manifest, and the group of the current membership.

    start: what pushes of an adapter are added to; None: they are refused.
    """

    def __init__(self, device: torch.device, *, start: StartWeights | None = None) -> None:
        self.device = device
        self._start = start
        self._merged: Merged | None = None
        self._manifest_hash = ""
        self._plan: tuple[Bucket, ...] = ()
        self._buffers: list[Tensor] = []
        self._incoming: Incoming | None = None
        self._group_id = ""
        self._group: Group | None = None
        self._mapped: tuple[bytes, list[Tensor]] = (b"", [])

    def open(self, request: BeginPushRequest, *, rank_offset: int = 0) -> None:
        """Begin to receive; the manifest comes whole. A push that is still open is dropped.

        ValueError where an adapter comes and there is nothing that it could be added to.
        """
        if self._incoming is not None:
            self.drop()
        self._stage(request.manifest)
        buffers, plan, merged = self._buffers, self._plan, self._merged
        deadline = time.monotonic() + request.deadline_seconds

        def receive() -> list[int]:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread
            self._fill(request, plan, buffers, rank_offset=rank_offset)
            found = checksums(buffers)
            if merged is not None:
                merged.make(dict(named_views(plan, buffers)))
            return found

        self._incoming = Incoming(request.policy_version, receive, deadline=deadline)

    def poll(self) -> list[int] | None:
        """Checksums of what has arrived, None while it is still coming; TransferFailed if it broke."""
        incoming = self._open_push()
        return self._sums(incoming, seconds=0.0) if incoming.arrived.done() else None

    def wait(self, expected: Sequence[int]) -> None:
        """Block until all has arrived and is what was sent; TransferFailed otherwise, at the latest by the deadline."""
        incoming = self._open_push()
        verify(self._sums(incoming, seconds=max(incoming.deadline - time.monotonic(), 0.0)), expected)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """New weights in staging memory: (name, tensor) in the order of the manifest; the same memory push after push.

        Of an adapter the sums, and what else the model needs to be loaded.
        """
        return named_views(self._plan, self._buffers) if self._merged is None else self._merged.tensors()

    def taken(self) -> None:
        """The engine has the version; staging memory is kept for the next one."""
        self._incoming = None

    def release(self) -> None:
        """Give staging memory back, unless a push is open; the next push takes new."""
        if self._incoming is None:
            self._manifest_hash, self._buffers, self._merged = "", [], None
            if self._start is not None:
                self._start.release()

    def drop(self) -> None:
        """Forget what was under way, and the group, which is in an unknown state. Unknown, too, is what writes later
        into the staging memory: the next push gets new."""
        if self._group is not None:
            self._group.abort()
        if self._incoming is not None:
            self._incoming.abandon()
            if self.device != CPU:  # its memory is wanted back
                self._incoming.thread.join(JOIN_SECONDS)
        self._group_id, self._group, self._incoming = "", None, None
        self._manifest_hash, self._buffers, self._merged = "", [], None

    def _open_push(self) -> Incoming:
        if self._incoming is None:
            raise TransferFailed("no push is open")
        return self._incoming

    @staticmethod
    def _sums(incoming: Incoming, *, seconds: float) -> list[int]:
        try:
            return incoming.arrived.result(seconds)
        except Exception as error:
            raise TransferFailed(f"{type(error).__name__}: {str(error)[:300]}") from error

    def _stage(self, manifest: Manifest) -> None:
        if manifest.hash != self._manifest_hash:
            self._merged = self._merged_of(manifest)
            self._plan = plan_buckets(manifest)
            self._buffers = make_buffers(self._plan, device=self.device)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # or the zeros could still come after what another stream receives
            self._manifest_hash = manifest.hash

    def _merged_of(self, manifest: Manifest) -> Merged | None:
        if not manifest.low_rank:
            return None
        if self._start is None:
            raise ValueError("an adapter cannot be taken: the engine does not say where its start model lies")
        return Merged(manifest, self._start, self.device)

    # How the bytes come.

    def _fill(
        self, request: BeginPushRequest, plan: Sequence[Bucket], buffers: list[Tensor], *, rank_offset: int
    ) -> None:
        if request.transport == Transport.TRANSPORT_DISK:
            read_file(Path(request.path), plan, buffers)
        elif request.transport == Transport.TRANSPORT_IPC:
            self._read_shared(request.shared, buffers)
        else:
            self._receive(request, buffers, rank_offset=rank_offset)

    def _read_shared(self, handles: Sequence[SharedBuffer], buffers: Sequence[Tensor]) -> None:
        """The trainer's buckets are mapped once: torch counts who opens a handle, and each may be opened once."""
        key = b"".join(one.handle + one.counter + one.counter_offset.to_bytes(8, "little") for one in handles)
        if key != self._mapped[0]:
            self._mapped = (key, open_shared(handles))
        for buffer, shared in zip(buffers, self._mapped[1], strict=True):
            buffer.copy_(shared)
        torch.cuda.synchronize(self.device)

    def _receive(self, request: BeginPushRequest, buffers: list[Tensor], *, rank_offset: int) -> None:
        kind = "nccl" if request.transport == Transport.TRANSPORT_NCCL else "gloo"
        group = self._join(kind, request.rendezvous, rank_offset, deadline_seconds=request.deadline_seconds)
        landing = buffers if kind == "nccl" or self.device == CPU else [buffer.to(CPU) for buffer in buffers]
        group.broadcast(landing, deadline_seconds=request.deadline_seconds)
        if landing is not buffers:
            for buffer, landed in zip(buffers, landing, strict=True):
                buffer.copy_(landed)

    def _join(self, kind: str, place: Rendezvous, rank_offset: int, *, deadline_seconds: float) -> Group:
        if place.group_id == self._group_id and self._group is not None:
            return self._group
        if self._group is not None:
            self._group.abort()
        store = join_store(place.host, place.port, deadline_seconds=deadline_seconds)
        group = open_group(
            kind,
            store,
            nonce=place.nonce,
            rank=place.rank + rank_offset,
            world_size=place.world_size,
            host=address_towards(place.host, place.port),
            device=self.device,
            deadline_seconds=deadline_seconds,
        )
        self._group_id, self._group = place.group_id, group
        return group


def verify(found: Sequence[int], expected: Sequence[int]) -> None:
    """TransferFailed, naming the buckets, where checksums differ."""
    longest = max(len(found), len(expected))
    wrong = [at for at in range(longest) if at >= min(len(found), len(expected)) or found[at] != expected[at]]
    if wrong:
        raise TransferFailed(f"checksum mismatch in buckets {wrong[:10]}", corrupt=True)


def read_file(path: Path, plan: Sequence[Bucket], buffers: Sequence[Tensor]) -> None:
    """Read a safetensors file into the buckets."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for bucket, buffer in zip(plan, buffers, strict=True):
            for slot in bucket.slots:
                view(buffer, slot).copy_(file.get_tensor(slot.name))
