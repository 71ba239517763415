"""Where the ranks of a broadcast meet: a store that the trainer holds open. Imports torch."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # torch's stubs do not export all of them
    PrefixStore,
    Store,
    TCPStore,
)

POLL_SECONDS = 0.001


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


def meet(store: Store, *, nonce: str, world_size: int, deadline_seconds: float) -> PrefixStore:
    """Wait until all ranks have come, under the secret prefix `nonce`; RuntimeError where one stays away.

    A collective that has begun with a rank missing can hardly be ended: who is not here by now is told apart first.
    """
    place = PrefixStore(nonce, store)
    give_up = time.monotonic() + deadline_seconds
    present = place.add("present", 1)
    while present < world_size:
        if time.monotonic() > give_up:
            raise RuntimeError(f"{world_size - present} of {world_size} ranks did not come in {deadline_seconds:g} s")
        time.sleep(POLL_SECONDS)
        present = place.add("present", 0)
    return place
