"""One rollout server as a target of pushes: the three control calls, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

import protos
from services.channel import call, connect
from services.errors import PeerError
from services.pushes.transports import Reach, ladder, reach_of

Reply = TypeVar("Reply")
BEGIN_SECONDS = 10.0
"""An engine answers between two steps; a step over long prompts takes seconds."""
ABORT_SECONDS = 5.0


class Peer:
    """A server, how it can be reached, and what it knows."""

    def __init__(self, server: protos.RolloutAddress) -> None:
        self.name = server.name
        self.address = server.address
        self.reach = reach_of(server.capabilities)
        self.channel = connect(server.address)
        self.stub = protos.RolloutStub(self.channel)
        self.known_manifest = ""
        self.version = -1 if server.needs_version else server.policy_version
        """That it has, as far as is known; -1: none."""
        self.is_ours = False
        """Its version came from this trainer."""
        self._failed: set[str] = set()

    @property
    def key(self) -> str:
        return f"{self.name}@{self.address}"

    def transports(self, wanted: str, trainer: Reach) -> tuple[list[str], str]:
        """What may still be tried, best first, and why it is not what one would expect."""
        found, why = ladder(wanted, trainer, self.reach)
        return [transport for transport in found if transport not in self._failed] or found[-1:], why

    def give_up(self, transport: str) -> None:
        """This transport has failed again and again: it is not tried any more."""
        self._failed.add(transport)

    async def begin(self, request: protos.BeginPushRequest, manifest: protos.Manifest) -> protos.BeginPushReply:
        """Open a push; the manifest goes along where the server does not know it."""
        request.manifest.hash = manifest.hash
        if self.known_manifest != manifest.hash:
            request.manifest.CopyFrom(manifest)
        what = f"opening a push on {self.name}"
        reply = await call(self.stub.BeginPush, request, deadline_seconds=BEGIN_SECONDS, what=what)
        if reply.manifest_unknown:  # it was restarted since
            request.manifest.CopyFrom(manifest)
            reply = await call(self.stub.BeginPush, request, deadline_seconds=BEGIN_SECONDS, what=what)
        self.known_manifest = manifest.hash
        return reply

    async def commit(self, request: protos.CommitPushRequest, *, deadline_seconds: float) -> protos.CommitPushReply:
        """Wait for arrival, verification and swap."""
        what = f"committing version {request.policy_version} on {self.name}"
        return await call(self.stub.CommitPush, request, deadline_seconds=deadline_seconds, what=what)

    async def abort(self, request: protos.AbortPushRequest) -> protos.AbortPushReply:
        """Give the push up; who does not answer is gone."""
        what = f"aborting on {self.name}"
        return await call(self.stub.AbortPush, request, deadline_seconds=ABORT_SECONDS, what=what)


async def each(
    peers: Sequence[Peer], action: Callable[[Peer], Awaitable[Reply]]
) -> tuple[dict[str, Reply], dict[str, str]]:
    """Do something on all servers at once: (reply, problem) by name."""
    outcomes = await asyncio.gather(*(action(peer) for peer in peers), return_exceptions=True)
    replies: dict[str, Reply] = {}
    problems: dict[str, str] = {}
    for peer, outcome in zip(peers, outcomes, strict=True):
        if isinstance(outcome, (PeerError, grpc.aio.UsageError, asyncio.CancelledError)):
            problems[peer.name] = str(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            replies[peer.name] = outcome
    return replies, problems
