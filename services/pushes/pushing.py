"""A push, seen from the trainer: begin, transfer, commit; what fails is aborted or evicted, and the rest go on.

Commits are asked for while the bytes still travel: each server answers when it has swapped, and one that dies is
noticed by its broken call at once, not by a collective that waits for it. The checksums of streamed weights are known
at the end only; so are their commits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import protos
from services.errors import PeerRefused
from services.faults import fault
from services.pushes.peers import Peer, each
from services.pushes.transports import BROADCASTS, WIRE, Reach

if TYPE_CHECKING:
    from trainer.pushes.outgoing import Outgoing
    from trainer.pushes.weights import Broadcaster, Crew

logger = logging.getLogger(__name__)
ATTEMPTS = 3
LATE_SECONDS = 1.0
"""A server may say that what it got is wrong before we have noted that all is sent."""
CPU_REACH = Reach(transports=frozenset({"gloo", "disk"}))
UPDATE_MODES = {
    "keep": protos.UPDATE_MODE_KEEP,
    "recompute": protos.UPDATE_MODE_RECOMPUTE,
    "restart": protos.UPDATE_MODE_RESTART,
}


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
        reach: Reach = CPU_REACH,
    ) -> None:
        self.outgoing = outgoing
        self.broadcaster = broadcaster
        self.incarnation = broadcaster.incarnation
        self._name = name
        self._deadline_seconds = deadline_seconds
        self._update_mode = UPDATE_MODES[update_mode]
        self._folder = folder
        self._reach = reach
        self._peers: dict[str, Peer] = {}

    # Membership.

    async def set_members(self, servers: Sequence[protos.RolloutAddress]) -> None:
        """The servers that later pushes go to."""
        wanted = {server.name: server for server in servers}
        for peer in list(self._peers.values()):
            if peer.name not in wanted or wanted[peer.name].address != peer.address:
                await self._let_go(peer)
        for name, server in wanted.items():
            if name not in self._peers:
                self._peers[name] = Peer(server)
            elif server.needs_version:  # a new process, where an older one was
                self._peers[name].version = -1
        self.broadcaster.keep_only(peer.key for peer in self._peers.values())

    async def _let_go(self, peer: Peer) -> None:
        self._peers.pop(peer.name, None)
        await peer.channel.close()

    @property
    def members(self) -> list[str]:
        return sorted(self._peers)

    def lacking(self, version: int) -> list[str]:
        """The members that have not got `version` from us."""
        return sorted(peer.name for peer in self._peers.values() if not peer.is_ours or peer.version < version)

    def oldest(self, names: Sequence[str]) -> int:
        """The oldest version that one of these has; -1 where one has none, or is gone."""
        return min(self._peers[name].version if name in self._peers else -1 for name in names)

    # One push.

    async def push(
        self, version: int, *, transport: str = "auto", names: Sequence[str] | None = None, concludes: bool = True
    ) -> protos.PushReport:
        """Bring the packed weights to `names` (default: every member); reports who has them and who was evicted.

        transport: auto takes the best for each server; another one is tried first. concludes: no further crew follows.
        """
        began = time.monotonic()
        report = protos.PushReport(
            policy_version=version, incarnation=self.incarnation, num_bytes=self.outgoing.num_bytes
        )
        peers = wanted = [self._peers[name] for name in (self.members if names is None else sorted(names))]
        used: set[str] = set()
        for attempt in range(ATTEMPTS):
            if not peers:
                break
            last = attempt == ATTEMPTS - 1
            crews = self._crews(peers, wanted=transport, last=last)
            used.update(kind for kind, _ in crews)
            problems: dict[str, str] = {}
            for found in await self._attempt_all(
                version, crews, report=report, together=not last and not self.outgoing.streamed
            ):
                problems |= found
            if not problems:
                break
            peers = await self._survivors(version, peers, problems, report=report, last=last)
        if concludes:
            await asyncio.to_thread(self.outgoing.conclude)
        for peer in wanted:
            if peer.name in report.committed:
                peer.version, peer.is_ours = version, True
        report.transport = "+".join(sorted(used))
        report.seconds = time.monotonic() - began
        return report

    def _crews(self, peers: Sequence[Peer], *, wanted: str, last: bool) -> list[tuple[str, list[Peer]]]:
        """Servers by transport. At the last attempt each is alone, a step down where there is one: a broken broadcast
        does not say whose fault it was."""
        crews: dict[str, list[Peer]] = {}
        alone = []
        for peer in peers:
            kinds, why = peer.transports(wanted, self._reach)
            if why:
                logger.warning("a transport is passed over", extra={"facts": {"server": peer.name, "why": why}})
            if last and len(kinds) > 1:
                peer.give_up(kinds[0])
                facts = {"server": peer.name, "from": kinds[0], "to": kinds[1]}
                logger.warning("a transport failed; another is taken from now on", extra={"facts": facts})
                kinds = kinds[1:]
            if last:
                alone.append((kinds[0], [peer]))
            else:
                crews.setdefault(kinds[0], []).append(peer)
        return alone or list(crews.items())

    async def _attempt_all(
        self, version: int, crews: list[tuple[str, list[Peer]]], *, report: protos.PushReport, together: bool
    ) -> list[dict[str, str]]:
        """Problems by server, crew by crew."""
        if together:
            tries = (self._attempt(version, peers, kind, report=report) for kind, peers in crews)
            return list(await asyncio.gather(*tries))
        return [await self._attempt(version, peers, kind, report=report) for kind, peers in crews]

    async def _attempt(
        self, version: int, peers: list[Peer], kind: str, *, report: protos.PushReport
    ) -> dict[str, str]:
        """One try with these servers; returns what went wrong by server."""
        began = time.monotonic()
        request = protos.BeginPushRequest(
            policy_version=version,
            incarnation=self.incarnation,
            deadline_seconds=self._deadline_seconds,
            transport=WIRE[kind],
        )
        if kind in BROADCASTS:
            replies, problems = await self._broadcast(request, peers, kind, report=report)
        else:
            await self._put_up(request, kind, version)
            replies, problems = await self._hand_over(request, peers, report=report)
            report.transfer_seconds = time.monotonic() - began
        report.stall_seconds = max([report.stall_seconds, *(reply.swap_seconds for reply in replies.values())])
        report.committed.extend(replies)
        return problems

    # By a file, or by memory that both see.

    async def _put_up(self, request: protos.BeginPushRequest, kind: str, version: int) -> None:
        if kind == "disk":
            request.path = str(await asyncio.to_thread(self._write, version))
        else:
            request.shared.extend(self.outgoing.shared())

    async def _hand_over(
        self, request: protos.BeginPushRequest, peers: list[Peer], *, report: protos.PushReport
    ) -> tuple[dict[str, protos.CommitPushReply], dict[str, str]]:
        began = time.monotonic()
        _, problems = await each(peers, lambda peer: peer.begin(copied(request), self.outgoing.manifest))
        report.begin_seconds = time.monotonic() - began
        begun = [peer for peer in peers if peer.name not in problems]
        replies, refused = await each(begun, lambda peer: self._commit(request.policy_version, peer))
        return replies, problems | refused

    def _write(self, version: int) -> Path:
        path = self._folder / f"version_{version}.safetensors"
        self.outgoing.write(path)
        for old in self._folder.glob("version_*.safetensors"):
            if old != path:
                old.unlink(missing_ok=True)
        return path.resolve()

    # By a broadcast.

    async def _broadcast(
        self, request: protos.BeginPushRequest, peers: list[Peer], kind: str, *, report: protos.PushReport
    ) -> tuple[dict[str, protos.CommitPushReply], dict[str, str]]:
        """A broken broadcast is everybody's problem who has not committed."""
        from trainer.pushes.weights import Receiving

        began = time.monotonic()
        crew = self.broadcaster.crew(kind, [Receiving(peer.key, peer.reach.receivers) for peer in peers])
        _, problems = await each(
            peers, lambda peer: peer.begin(copied(request, crew.place(peer.key)), self.outgoing.manifest)
        )
        report.begin_seconds = time.monotonic() - began
        if problems:
            self.broadcaster.forget(crew)
            return {}, {peer.name: problems.get(peer.name, "") for peer in peers}
        fault(self._name, "push.transfer")
        commits = {} if self.outgoing.streamed else self._commits(request.policy_version, peers)
        sending = await self._send(crew)
        sending.add_done_callback(lambda done: note_transfer(report, began))
        broken = await self._sent(sending, list(commits.values()))
        if broken:
            self.broadcaster.forget(crew)
            late = [peer for peer in peers if peer.name not in commits or not commits[peer.name].done()]
            await each(late, lambda peer: peer.abort(self._abortion(request.policy_version)))
            raise_if_ours(sending)
        if self.outgoing.streamed:
            if broken:
                return {}, {peer.name: broken for peer in peers}
            commits = self._commits(request.policy_version, peers)
        replies, refused = await each(peers, lambda peer: commits[peer.name])
        if refused and not broken:
            self.broadcaster.forget(crew)
        return replies, {name: f"{broken}; {why}" if broken else why for name, why in refused.items()}

    async def _send(self, crew: Crew) -> asyncio.Future[None]:
        """Begin to broadcast; the future ends with the last byte."""
        buffers = await asyncio.to_thread(self.outgoing.to_send, crew.kind)
        sending = asyncio.wrap_future(self.broadcaster.send(crew, buffers, deadline_seconds=self._deadline_seconds))
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has looked at it
        return sending

    async def _sent(self, sending: asyncio.Future[None], commits: list[asyncio.Task[protos.CommitPushReply]]) -> str:
        """Why the broadcast broke, or nothing. A commit that fails meanwhile breaks it: somebody is missing."""
        everything: set[asyncio.Future[object]] = {sending, *commits}  # type: ignore[arg-type]
        await asyncio.wait(everything, timeout=self._deadline_seconds, return_when=asyncio.FIRST_EXCEPTION)
        if not sending.done() and any(task.done() and isinstance(task.exception(), PeerRefused) for task in commits):
            await asyncio.wait({sending}, timeout=LATE_SECONDS)
        if not sending.done():
            return "broadcast: a server is missing, or the deadline is over"
        error = sending.exception()
        return "" if error is None else f"broadcast: {type(error).__name__}: {str(error)[:200]}"

    def _commits(self, version: int, peers: list[Peer]) -> dict[str, asyncio.Task[protos.CommitPushReply]]:
        return {
            peer.name: asyncio.create_task(self._commit(version, peer), name=f"commit-{peer.name}") for peer in peers
        }

    async def _commit(self, version: int, peer: Peer) -> protos.CommitPushReply:
        request = protos.CommitPushRequest(
            policy_version=version,
            incarnation=self.incarnation,
            checksums=self.outgoing.checksums,
            update_mode=self._update_mode,
        )
        return await peer.commit(request, deadline_seconds=self._deadline_seconds + LATE_SECONDS)

    # Failures.

    async def _survivors(
        self, version: int, peers: list[Peer], problems: dict[str, str], *, report: protos.PushReport, last: bool
    ) -> list[Peer]:
        """Abort what failed. Who answers the abort may try again in a fresh group; who does not is evicted."""
        failed = [peer for peer in peers if peer.name in problems]
        _, silent = await each(failed, lambda peer: peer.abort(self._abortion(version)))
        evicted = {
            peer.name: problems[peer.name] or silent.get(peer.name, "")
            for peer in failed
            if last or peer.name in silent
        }
        report.failed.update(evicted)
        logger.warning("a push failed", extra={"facts": {"version": version, "evicted": evicted, "problems": problems}})
        for peer in failed:
            if peer.name in evicted:
                await self._let_go(peer)
        return [peer for peer in failed if peer.name not in evicted]

    def _abortion(self, version: int) -> protos.AbortPushRequest:
        return protos.AbortPushRequest(policy_version=version, incarnation=self.incarnation, reason="transfer failed")


def note_transfer(report: protos.PushReport, began: float) -> None:
    """The last byte has left; the servers still verify and swap."""
    report.transfer_seconds = time.monotonic() - began


def raise_if_ours(sending: asyncio.Future[None]) -> None:
    """GatherFailed where the trainer lost a rank of its own: no server is to blame."""
    from trainer.pushes.gather import GatherFailed

    error = sending.exception() if sending.done() else None
    if isinstance(error, GatherFailed):
        raise error


def copied(request: protos.BeginPushRequest, place: protos.Rendezvous | None = None) -> protos.BeginPushRequest:
    """A server's own copy: its rank differs, and what it knows of the manifest."""
    own = protos.BeginPushRequest()
    own.CopyFrom(request)
    if place is not None:
        own.rendezvous.CopyFrom(place)
    return own
