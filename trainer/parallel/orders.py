"""What rank 0 tells the other ranks to do, one order after the other.

An order waits in a store, so that the others may wait for it however long; what is large travels by broadcast.
"""

import atexit
import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from trainer.parallel.start import Seat

logger = logging.getLogger(__name__)
LEAVE = "leave"
"""The last order."""
INLINE_BYTES = 2**16
KEPT = 64
"""Orders that stay in the store: one without an exchange does not wait for a rank that is slow."""
LOOK = timedelta(seconds=5)
"""A wait for the next order is broken off and begun anew this often: a store that is gone is noticed then."""


class RankLost(RuntimeError):
    """Another rank, or the store in which they meet, is gone."""


class Orders:
    """One end; every rank makes one. `give` on rank 0, `take` on the others."""

    def __init__(self, place: Seat) -> None:
        """Meets the others, where torchrun says."""
        self.size = place.size
        self.leads = place.rank == 0
        self._store: Store | None = None
        if place.size > 1:
            self._store, _, _ = next(iter(rendezvous("env://", place.rank, place.size)))
        self._given = 0
        self._over = False
        if self.leads and self._store is not None:
            atexit.register(self._leave)

    def _leave(self) -> None:
        """Rank 0 ends, in the middle of a drain, say: whoever waits for an order from it would wait for ever."""
        try:
            if not self._over:
                self.give(LEAVE)
        except RankLost as error:
            logger.warning("the other ranks were not told to leave", extra={"facts": {"why": str(error)}})

    def group_store(self) -> Store | None:
        """Where the process group meets."""
        return None if self._store is None else PrefixStore("group", self._store)

    def give(self, name: str, payload: bytes = b"") -> None:
        """All other ranks will do this next. RankLost where they cannot be told."""
        if self._store is None:
            return
        inline = len(payload) <= INLINE_BYTES
        head = f"{name} {len(payload)} ".encode()
        try:
            order = head + (payload if inline else b"")
            self._store.set(f"order/{self._given}", order)  # type: ignore[arg-type]  # bytes, whatever torch's stub says
            self._store.delete_key(f"order/{self._given - KEPT}")
            if not inline:
                dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0)
        except RuntimeError as error:
            raise RankLost(f"the other ranks cannot be told to {name}: {str(error)[:300]}") from error
        self._given += 1
        self._over = name == LEAVE

    def take(self) -> tuple[str, bytes]:
        """The next order, once there is one."""
        assert self._store is not None, "one rank has nobody to take orders from"
        key = f"order/{self._given}"
        while not self._is_there(key):
            pass
        name, size, inline = bytes(self._store.get(key)).split(b" ", 2)
        self._given += 1
        if len(inline) == int(size):
            return name.decode(), inline
        received: Tensor = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(received, 0)
        return name.decode(), received.numpy().tobytes()

    def _is_there(self, key: str) -> bool:
        assert self._store is not None
        try:
            self._store.wait([key], LOOK)
        except dist.DistNetworkError as error:
            raise RankLost(f"rank 0 is gone: {str(error)[:300]}") from error
        except dist.DistStoreError:
            return False
        return True
