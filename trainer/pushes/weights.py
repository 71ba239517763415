"""Send a version out: rank 0 of the groups in which its buckets are broadcast to rollout servers."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from protos import Rendezvous
from protos.groups import Group, open_group
from protos.meeting import host_store

CPU = torch.device("cpu")


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

    def send(self, crew: Crew, buffers: Iterable[Tensor], *, deadline_seconds: float) -> Future[None]:
        """Broadcast on a daemon thread: a collective cannot be interrupted, but whoever waits for it can give up.

        buffers: a sequence that is filled already, or a generator that fills them and is closed in any case.
        """
        return on_daemon_thread(lambda: self._send(crew, buffers, deadline_seconds), name="push")

    def _send(self, crew: Crew, buffers: Iterable[Tensor], deadline_seconds: float) -> None:
        try:
            if crew.group is None:
                crew.group = self._open(crew, deadline_seconds)
            crew.group.broadcast(buffers, deadline_seconds=deadline_seconds)
        finally:
            if isinstance(buffers, Generator):
                buffers.close()

    def _open(self, crew: Crew, deadline_seconds: float) -> Group:
        return open_group(
            crew.kind,
            self._store,
            nonce=crew.rendezvous.nonce,
            rank=0,
            world_size=crew.rendezvous.world_size,
            host=self.host,
            device=self.device,
            deadline_seconds=deadline_seconds,
        )


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
