"""Where the ranks of a Gloo broadcast meet; both ends of a push build their group here. Imports torch."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # torch's stubs do not export all of them
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)


def host_store(host: str) -> TCPStore:
    """Open the store of one trainer life on a free port of `host`; its port is `store.port`."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def join_store(host: str, port: int, *, deadline_seconds: float) -> TCPStore:
    """Connect to a store; RuntimeError where it is not there in time."""
    timeout = timedelta(seconds=deadline_seconds)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to `host`, by the routing table; nothing is sent. OSError without a way."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def open_group(
    store: Store, *, nonce: str, rank: int, world_size: int, host: str, deadline_seconds: float
) -> ProcessGroupGloo:
    """Meet the other ranks under the secret prefix `nonce`; blocks until all are there or the deadline is over.

    `host` is this rank's own address, on which the others reach it.
    The group is not torch's default one, so a process may hold several. Its collectives fail after the deadline.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=deadline_seconds)
    return ProcessGroupGloo(PrefixStore(nonce, store), rank, world_size, options)


def broadcast(group: ProcessGroupGloo, buffer: torch.Tensor) -> None:
    """Send (rank 0) or receive one flat uint8 buffer; RuntimeError where a peer died or the deadline is over."""
    group.broadcast(buffer, 0).wait()  # type: ignore[attr-defined]  # torch's stubs leave it out
