"""Who belongs to the run, and who is still alive: judged by heartbeats on the conductor's monotonic clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import protos

MISSED_BEATS = 3
Card = Literal["unknown", "asked", "awake", "asleep"]


class Stage(Protocol):
    """The servers of one role, as the conductor works with them."""

    async def connect(self, member: Member) -> None:
        """Open the stream to a server that has joined, in place of an older one to it."""

    async def drop(self, name: str, reason: str) -> None:
        """Close the stream to a server; what it had in hand goes elsewhere."""

    def in_hand(self, name: str) -> int:
        """Samples that the server has and has not answered."""


@dataclass(slots=True)
class Member:
    """A service that has joined."""

    name: str
    role: str
    address: str
    process_id: str
    identity: protos.Identity
    last_beat: float
    """Seconds on the monotonic clock."""
    policy_version: int = 0
    has_version: bool = False
    """Rollout: the trainer's committed version has reached this process in this membership."""
    incarnation: int = 0
    """Rollout: of the trainer that its version came from."""
    gauges: dict[str, float] = field(default_factory=dict)
    evicted: str = ""
    """Rollout: why this process gets no more work; empty: it does."""
    first_lease: int = 0
    """Rollout: all leases of this membership have larger numbers."""
    logprob_diff_mean: float | None = None
    """Rollout: of the last step with samples of it, nats."""
    card: Card = "unknown"
    """Rollout, with time sharing: whether it holds its device's memory; asked: it was told to change that."""


class Roster:
    """The members by name."""

    def __init__(self, *, heartbeat_seconds: float) -> None:
        self.heartbeat_seconds = heartbeat_seconds
        self.members: dict[str, Member] = {}
        self.lost: dict[str, str] = {}
        """Name of a service that is gone -> why."""
        self.evicted: dict[str, str] = {}
        """Process id of a server that gets no more work -> why."""
        self._holders: dict[str, str] = {}
        """Name -> the newest process that has borne it."""
        self._replaced: set[str] = set()
        """Processes whose name a newer one has taken: they stay out, or the two would take turns for ever."""

    def join(self, request: protos.JoinRequest, *, now: float) -> Member:
        """Add or replace a member; a rollout server serves only after the trainer has brought it a version.

        ValueError for a process that was replaced.
        """
        identity = request.identity
        holder = self._holders.get(identity.name, request.process_id)
        if request.process_id in self._replaced:
            raise ValueError(f"process {holder} has taken over as {identity.name}")
        if holder != request.process_id:
            self._replaced.add(holder)
        self._holders[identity.name] = request.process_id
        member = Member(identity.name, identity.role, request.address, request.process_id, identity, now)
        member.policy_version = request.policy_version
        member.evicted = self.evicted.get(request.process_id, "")
        self.members[identity.name] = member
        self.lost.pop(identity.name, None)
        return member

    def beat(self, request: protos.HeartbeatRequest, *, now: float) -> bool:
        """Note a sign of life; False where the sender is no member (any more)."""
        member = self.members.get(request.name)
        if member is None or member.process_id != request.process_id:
            return False
        member.last_beat = now
        member.gauges = dict(request.gauges)
        return True

    def evict(self, name: str, reason: str) -> Member:
        """Give the process that is `name` now no more work, also when it joins again."""
        member = self.members[name]
        member.evicted = self.evicted[member.process_id] = reason
        return member

    def bring_up(self, push: protos.PushReport) -> list[Member]:
        """Note who has got a version, and return them; a report of an older push may come late."""
        reached = [self.members[name] for name in push.committed if name in self.members]
        for member in reached:
            told, known = (push.incarnation, push.policy_version), (member.incarnation, member.policy_version)
            if not member.has_version or told >= known:
                member.incarnation, member.policy_version = told
                member.has_version = True
        return reached

    def lose(self, name: str, reason: str) -> Member | None:
        """Take a member out; None where it was out already."""
        member = self.members.pop(name, None)
        if member is not None:
            self.lost[name] = reason
        return member

    def silent(self, *, now: float) -> list[Member]:
        """Members whose heartbeats have stopped."""
        limit = MISSED_BEATS * self.heartbeat_seconds
        return [member for member in self.members.values() if now - member.last_beat > limit]

    def of(self, role: str) -> Iterator[Member]:
        """The members of a role that may work."""
        return (member for member in self.members.values() if member.role == role and not member.evicted)
