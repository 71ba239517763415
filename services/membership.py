"""A service's side of belonging to a run: join, heartbeat from the app loop, join again, leave."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

import protos
from services.actor import Actor
from services.channel import Retry, call, connect
from services.errors import PeerError, Replaced

logger = logging.getLogger(__name__)
JOIN_RETRY = Retry(budget_seconds=30.0)
DEADLINE_SECONDS = 5.0


class Membership:
    """Keeps one actor in a run. The conductor may die and come back: the service joins again and works on."""

    def __init__(self, actor: Actor, conductor: str, *, state: Callable[[], protos.JoinRequest]) -> None:
        self.actor = actor
        self.conductor = conductor
        self.run_id = ""
        self.incarnation = 0
        self._state = state
        self._heartbeat_seconds = 1.0
        self._channel = connect(conductor)
        self._stub = protos.ConductorStub(self._channel)
        self._busy_before = (time.monotonic(), 0.0)
        self._evicted = ""

    async def run_config(self, *, patience_seconds: float = 60.0) -> protos.RunConfigReply:
        """The run's config, for a service that was given an address alone."""
        retry = Retry(budget_seconds=patience_seconds)
        what = f"asking the conductor at {self.conductor} for the run's config"
        return await call(
            self._stub.RunConfig, protos.RunConfigRequest(), deadline_seconds=DEADLINE_SECONDS, retry=retry, what=what
        )

    async def join(self) -> None:
        """Tell the conductor who and where we are; PeerRefused where it does not want us."""
        request = self._state()
        request.identity.CopyFrom(self.actor.identity)
        request.address = self.actor.address
        request.process_id = self.actor.process_id
        request.incarnation = self.incarnation
        what = f"{self.actor.name} joining the run at {self.conductor}"
        reply = await call(self._stub.Join, request, deadline_seconds=DEADLINE_SECONDS, retry=JOIN_RETRY, what=what)
        self.run_id, self.incarnation = reply.run_id, reply.incarnation
        self._heartbeat_seconds = reply.heartbeat_seconds
        logger.info("joined", extra={"facts": {"run": reply.run_id, "conductor": self.conductor}})

    async def stay(self) -> None:
        """Beat until the run is over; a lost conductor is waited for. Replaced where it does not want us any more."""
        while not self.actor.draining.is_set():
            try:
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self.actor.draining.wait()
            except TimeoutError:
                await self._beat()

    async def _beat(self) -> None:
        try:
            state = self._state()
            request = protos.HeartbeatRequest(
                name=self.actor.name,
                process_id=self.actor.process_id,
                policy_version=state.policy_version,
                gauges={"cpu_seconds": time.process_time(), "pid": os.getpid()},
            )
            what = f"{self.actor.name} heartbeat"
            reply = await call(self._stub.Heartbeat, request, deadline_seconds=DEADLINE_SECONDS, what=what)
            if reply.evicted and not self._evicted:
                logger.error("evicted: no more work until it is started again", extra={"facts": {"why": reply.evicted}})
            self._evicted = reply.evicted
            if reply.finished:
                self.actor.drain()
            elif not reply.known:
                await self.join()
        except PeerError as error:
            if error.code.name == "FAILED_PRECONDITION":
                raise Replaced(str(error)) from error
            logger.warning("the conductor does not answer; trying again", extra={"facts": {"why": str(error)}})

    async def leave(self, reason: str) -> None:
        """Say goodbye where we have joined; a conductor that is gone already is no error. Safe to call twice."""
        request = protos.LeaveRequest(name=self.actor.name, process_id=self.actor.process_id, reason=reason)
        joined, self.run_id = self.run_id, ""
        try:
            if joined:
                await call(self._stub.Leave, request, deadline_seconds=1.0, what=f"{self.actor.name} leaving")
        except PeerError:
            logger.debug("the conductor was gone before we left")
        await self._channel.close()
