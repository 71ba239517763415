"""The groups that weights are broadcast in: Gloo between CPUs, NCCL between GPUs. Both have a deadline and a way out.

None of them is torch's default group, so a process may hold several beside its own. Imports torch.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]  # not in torch's stubs

from protos.meeting import meet

NEVER = timedelta(days=30)
POLL_SECONDS = 0.0002
RING = 2
"""Buffers of a stream: while one is broadcast, the other is filled."""
# Torch's own guards end the whole process when a collective is late: a dead rollout server must not take the trainer
# with it. The deadline is kept here instead, and a late group is aborted.
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
_SETTING = threading.Lock()


class Group(Protocol):
    """Ranks of one broadcast; rank 0 sends."""

    def broadcast(self, buffers: Iterable[Tensor], *, deadline_seconds: float) -> None:
        """Send or receive flat uint8 buffers in order; RuntimeError where a peer died or the deadline is over.

        An iterator that is no sequence is a stream: it is asked for bucket k + 1 while bucket k is under way, and for
        bucket k + RING, which takes the same memory, when bucket k is through.
        """

    def abort(self) -> None:
        """End what is under way, from any thread; the group is of no use afterwards."""


def open_group(
    kind: str,
    store: Store,
    *,
    nonce: str,
    rank: int,
    world_size: int,
    host: str,
    device: torch.device,
    deadline_seconds: float,
) -> Group:
    """Meet the other ranks; blocks until all are there. RuntimeError when the deadline is over.

    kind: gloo or nccl. host: this rank's own address, on which the others reach it (gloo).
    """
    began = time.monotonic()
    place = meet(store, nonce=nonce, world_size=world_size, deadline_seconds=deadline_seconds)
    left = max(deadline_seconds - (time.monotonic() - began), 0.1)
    if kind == "nccl":
        return NcclGroup(place, rank=rank, world_size=world_size, device=device)
    return GlooGroup(place, rank=rank, world_size=world_size, host=host, deadline_seconds=left)


class GlooGroup:
    """Buffers lie in host memory. A dead peer is noticed at once, a stopped one at the deadline of the group."""

    def __init__(self, store: Store, *, rank: int, world_size: int, host: str, deadline_seconds: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=deadline_seconds)
        self._group = ProcessGroupGloo(store, rank, world_size, options)

    def broadcast(self, buffers: Iterable[Tensor], *, deadline_seconds: float) -> None:
        give_up = time.monotonic() + deadline_seconds
        under_way: deque[dist.Work] = deque()
        for buffer in buffers:
            left = max(give_up - time.monotonic(), 0.001)
            self._group._set_default_timeout(timedelta(seconds=left))
            under_way.append(self._group.broadcast(buffer, 0))  # type: ignore[attr-defined]  # torch's stubs leave it out
            if len(under_way) == RING:
                under_way.popleft().wait()
        for work in under_way:
            work.wait()

    def abort(self) -> None:
        """Gloo cannot be interrupted: it ends by its own deadline, on the daemon thread that it runs on."""


class NcclGroup:
    """Buffers lie on `device`. The collectives run on a stream of their own beside the work of the GPU."""

    def __init__(self, store: Store, *, rank: int, world_size: int, device: torch.device) -> None:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = NEVER
        self._device = device
        self._aborted = threading.Event()
        with torch.cuda.device(device), _environment(NCCL_SETTINGS):
            self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._filling = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def broadcast(self, buffers: Iterable[Tensor], *, deadline_seconds: float) -> None:
        give_up = time.monotonic() + deadline_seconds
        streamed = not isinstance(buffers, Sequence)
        under_way: deque[torch.cuda.Event] = deque()
        with torch.cuda.device(self._device), torch.cuda.stream(self._filling):
            for buffer in buffers:
                under_way.append(self._queue(buffer))
                # What is filled already is queued at once. A stream waits here, on the host: the stream that fills
                # never stands behind a dead peer, so it can go on to its end when the group is aborted.
                if streamed and len(under_way) == RING:
                    self._wait(under_way.popleft(), give_up)
        while under_way:
            self._wait(under_way.popleft(), give_up)

    def _queue(self, buffer: Tensor) -> torch.cuda.Event:
        """Broadcast after what is queued for filling by now; only the streams wait. The event marks its end."""
        self._stream.wait_stream(self._filling)
        with torch.cuda.stream(self._stream):
            self._group.broadcast(buffer, 0).wait()  # type: ignore[attr-defined]  # torch's stubs leave it out
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done

    def _wait(self, done: torch.cuda.Event, give_up: float) -> None:
        while not done.query():  # type: ignore[no-untyped-call]
            if self._aborted.is_set() or time.monotonic() > give_up:
                self.abort()
                raise RuntimeError("the NCCL broadcast was aborted: by another thread, or its deadline is over")
            time.sleep(POLL_SECONDS)
        if self._aborted.is_set():
            raise RuntimeError("the NCCL broadcast was aborted")

    def abort(self) -> None:
        """Kernels that wait for a dead peer end; the streams of the device are free again."""
        if not self._aborted.is_set():
            self._aborted.set()
            self._group.abort()


def nccl_version() -> str:
    """Of the library that this torch brings, e.g. 2.28.9; empty where it has none. Both ends must have the same."""
    if not dist.is_nccl_available() or torch.version.cuda is None:
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """NCCL groups read these when they are made; the groups of the trainer's own ranks keep theirs."""
    with _SETTING:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
