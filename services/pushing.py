"""A push, seen from the trainer: begin, transfer, commit; what fails is aborted or evicted, and the rest go on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

import protos
from services.channel import call, connect
from services.errors import PeerError, PushFailed
from services.faults import fault

if TYPE_CHECKING:
    from trainer.weights import Broadcaster, Outgoing

logger = logging.getLogger(__name__)
Reply = TypeVar("Reply")
ATTEMPTS = 3
CONTROL_SECONDS = 5.0
UPDATE_MODES = {
    "keep": protos.UPDATE_MODE_KEEP,
    "recompute": protos.UPDATE_MODE_RECOMPUTE,
    "restart": protos.UPDATE_MODE_RESTART,
}


class Peer:
    """One rollout server as a target of pushes."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.channel = connect(address)
        self.stub = protos.RolloutStub(self.channel)
        self.known_manifest = ""


class Pusher:
    """Brings packed weights to rollout servers; one push at a time."""

    def __init__(
        self,
        outgoing: Outgoing,
        broadcaster: Broadcaster,
        *,
        name: str,
        deadline_seconds: float,
        update_mode: str,
        folder: Path,
    ) -> None:
        self.outgoing = outgoing
        self.broadcaster = broadcaster
        self.incarnation = broadcaster.incarnation
        self._name = name
        self._deadline_seconds = deadline_seconds
        self._update_mode = UPDATE_MODES[update_mode]
        self._folder = folder
        self._peers: dict[str, Peer] = {}

    async def set_members(self, servers: Sequence[protos.RolloutAddress]) -> None:
        """The servers that later pushes go to."""
        wanted = {server.name: server.address for server in servers}
        for peer in [peer for peer in self._peers.values() if wanted.get(peer.name) != peer.address]:
            del self._peers[peer.name]
            await peer.channel.close()
        for name, address in wanted.items():
            if name not in self._peers:
                self._peers[name] = Peer(name, address)

    @property
    def members(self) -> list[str]:
        return sorted(self._peers)

    async def push(self, version: int, *, transport: str, names: Sequence[str] | None = None) -> protos.PushReport:
        """Bring the packed weights to `names` (default: every member); reports who has them and who was evicted."""
        began = time.monotonic()
        peers = [self._peers[name] for name in (self.members if names is None else sorted(names))]
        report = protos.PushReport(
            policy_version=version, incarnation=self.incarnation, num_bytes=self.outgoing.num_bytes, transport=transport
        )
        for attempt in range(ATTEMPTS):
            if not peers:
                break
            last = attempt == ATTEMPTS - 1
            # A broken broadcast does not say whose fault it was: in the end each server has a group of its own.
            crews = [[peer] for peer in peers] if last and transport == "gloo" else [peers]
            problems: dict[str, str] = {}
            for crew in crews:
                problems |= await self._attempt(version, crew, transport=transport, report=report)
            if not problems:
                break
            peers = await self._survivors(version, peers, problems, report=report, last=last)
        report.seconds = time.monotonic() - began
        return report

    async def _attempt(
        self, version: int, peers: list[Peer], *, transport: str, report: protos.PushReport
    ) -> dict[str, str]:
        """One try with these servers; returns what went wrong by server. A broken broadcast is everybody's problem."""
        began = time.monotonic()
        problems = await self._begin(version, peers, transport=transport)
        begun = [peer for peer in peers if peer.name not in problems]
        if problems and transport == "gloo":
            return problems | {peer.name: "" for peer in begun}
        if transport == "gloo":
            try:
                await self._broadcast()
            except PushFailed as error:
                return {peer.name: str(error) for peer in peers}
        report.transfer_seconds = time.monotonic() - began
        replies, refused = await self._each(begun, lambda peer: self._commit(version, peer))
        report.stall_seconds = max((reply.swap_seconds for reply in replies), default=0.0)
        report.committed.extend(peer.name for peer in begun if peer.name not in refused)
        return problems | refused

    async def _begin(self, version: int, peers: list[Peer], *, transport: str) -> dict[str, str]:
        request = protos.BeginPushRequest(
            policy_version=version,
            incarnation=self.incarnation,
            deadline_seconds=self._deadline_seconds,
            transport=protos.TRANSPORT_DISK if transport == "disk" else protos.TRANSPORT_GLOO,
        )
        places: dict[str, protos.Rendezvous] = {}
        if transport == "disk":
            request.path = str(await asyncio.to_thread(self._write, version))
        else:
            members = tuple(f"{peer.name}@{peer.address}" for peer in peers)
            places = {peer.name: place for peer, place in zip(peers, self.broadcaster.rendezvous(members), strict=True)}
        _, problems = await self._each(peers, lambda peer: self._begin_one(peer, request, places.get(peer.name)))
        return problems

    async def _begin_one(
        self, peer: Peer, template: protos.BeginPushRequest, place: protos.Rendezvous | None
    ) -> protos.BeginPushReply:
        request = protos.BeginPushRequest()
        request.CopyFrom(template)
        if place is not None:
            request.rendezvous.CopyFrom(place)
        request.manifest.hash = self.outgoing.manifest.hash
        if peer.known_manifest != request.manifest.hash:
            request.manifest.CopyFrom(self.outgoing.manifest)
        what = f"opening a push on {peer.name}"
        reply = await call(peer.stub.BeginPush, request, deadline_seconds=CONTROL_SECONDS, what=what)
        if reply.manifest_unknown:  # it was restarted since
            request.manifest.CopyFrom(self.outgoing.manifest)
            reply = await call(peer.stub.BeginPush, request, deadline_seconds=CONTROL_SECONDS, what=what)
        peer.known_manifest = request.manifest.hash
        return reply

    def _write(self, version: int) -> Path:
        path = self._folder / f"version_{version}.safetensors"
        self.outgoing.write(path)
        for old in self._folder.glob("version_*.safetensors"):
            if old != path:
                old.unlink(missing_ok=True)
        return path.resolve()

    async def _broadcast(self) -> None:
        fault(self._name, "push.transfer")
        sending = self.broadcaster.send(self.outgoing.buffers, deadline_seconds=self._deadline_seconds)
        try:
            async with asyncio.timeout(self._deadline_seconds):
                await asyncio.wrap_future(sending)
        except (TimeoutError, RuntimeError) as error:
            raise PushFailed(f"broadcast: {type(error).__name__}: {str(error)[:200]}") from error

    async def _commit(self, version: int, peer: Peer) -> protos.CommitPushReply:
        request = protos.CommitPushRequest(
            policy_version=version,
            incarnation=self.incarnation,
            checksums=self.outgoing.checksums,
            update_mode=self._update_mode,
        )
        what = f"committing version {version} on {peer.name}"
        return await call(peer.stub.CommitPush, request, deadline_seconds=self._deadline_seconds, what=what)

    async def _survivors(
        self, version: int, peers: list[Peer], problems: dict[str, str], *, report: protos.PushReport, last: bool
    ) -> list[Peer]:
        """Abort what failed. Who answers the abort may try again in a fresh group; who does not is evicted."""
        self.broadcaster.forget()
        failed = [peer for peer in peers if peer.name in problems]
        request = protos.AbortPushRequest(
            policy_version=version, incarnation=self.incarnation, reason="transfer failed"
        )
        _, silent = await self._each(
            failed,
            lambda peer: call(peer.stub.AbortPush, request, deadline_seconds=2.0, what=f"aborting on {peer.name}"),
        )
        evicted = {
            peer.name: problems[peer.name] or silent.get(peer.name, "")
            for peer in failed
            if last or peer.name in silent
        }
        report.failed.update(evicted)
        logger.warning("a push failed", extra={"facts": {"version": version, "evicted": evicted, "problems": problems}})
        for name in evicted:
            peer = self._peers.pop(name, None)
            if peer is not None:
                await peer.channel.close()
        return [peer for peer in failed if peer.name not in evicted]

    async def _each(
        self, peers: Sequence[Peer], action: Callable[[Peer], Awaitable[Reply]]
    ) -> tuple[list[Reply], dict[str, str]]:
        """Do something on all servers at once: (replies, problem by server)."""
        outcomes = await asyncio.gather(*(action(peer) for peer in peers), return_exceptions=True)
        replies, problems = [], {}
        for peer, outcome in zip(peers, outcomes, strict=True):
            if isinstance(outcome, (PeerError, grpc.aio.UsageError, asyncio.CancelledError)):
                problems[peer.name] = str(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                replies.append(outcome)
        return replies, problems
