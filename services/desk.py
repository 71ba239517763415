"""The conductor's RPCs: who joins, who beats, who asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

import protos
from services.actor import mismatch

if TYPE_CHECKING:
    from services.conductor import Conductor

WATCH_QUEUE = 1000


class Desk(protos.ConductorServicer):
    """Answers for the conductor; changes its state only through its methods."""

    def __init__(self, conductor: Conductor) -> None:
        self.conductor = conductor

    async def RunConfig(self, request: protos.RunConfigRequest, context: Any) -> protos.RunConfigReply:
        await self._ready(context)
        conductor = self.conductor
        return protos.RunConfigReply(
            config_json=conductor.config.model_dump_json(),
            run_id=conductor.run_id,
            run_folder=str(conductor.folder.resolve()),
        )

    async def Join(self, request: protos.JoinRequest, context: Any) -> protos.JoinReply:
        await self._ready(context)
        problem = self._misfit(request)
        if problem:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        try:
            incarnation = self.conductor.admit(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return protos.JoinReply(
            run_id=self.conductor.run_id,
            incarnation=incarnation,
            heartbeat_seconds=self.conductor.config.conductor.heartbeat_seconds,
        )

    def _misfit(self, request: protos.JoinRequest) -> str:
        """Why a service does not fit into this run: protocol, or a model that differs from what others hold."""
        ours = self.conductor.identity
        problem = mismatch(ours, request.identity)
        if problem or not request.identity.model_hash:
            return problem
        others = (member.identity for member in self.conductor.roster.members.values())
        return next((text for other in others if (text := mismatch(other, request.identity))), "")

    async def Heartbeat(self, request: protos.HeartbeatRequest, context: Any) -> protos.HeartbeatReply:
        await self._ready(context)
        now = asyncio.get_running_loop().time()
        known = self.conductor.roster.beat(request, now=now)
        member = self.conductor.roster.members.get(request.name)
        return protos.HeartbeatReply(
            known=known,
            finished=self.conductor.finished.is_set(),
            evicted=member.evicted if member is not None and known else "",
        )

    async def Leave(self, request: protos.LeaveRequest, context: Any) -> protos.LeaveReply:
        member = self.conductor.roster.members.get(request.name)
        if member is not None and member.process_id == request.process_id:
            self.conductor.lose(request.name, request.reason)
            self.conductor.post(lambda: None)
        return protos.LeaveReply()

    async def PauseRun(self, request: protos.PauseRunRequest, context: Any) -> protos.PauseRunReply:
        self.conductor.paused = True
        return protos.PauseRunReply()

    async def ResumeRun(self, request: protos.ResumeRunRequest, context: Any) -> protos.ResumeRunReply:
        self.conductor.paused = False
        self.conductor.post(lambda: None)
        return protos.ResumeRunReply()

    async def Status(self, request: protos.ConductorStatusRequest, context: Any) -> protos.ConductorStatusReply:
        await self._ready(context)
        return self.conductor.status()

    async def Watch(self, request: protos.WatchRequest, context: Any) -> AsyncIterator[protos.TelemetryEvent]:
        await self._ready(context)
        queue: asyncio.Queue[protos.TelemetryEvent] = asyncio.Queue(WATCH_QUEUE)
        with self.conductor.journalist.watched_by(queue, from_start=request.from_start):
            while not self.conductor.draining.is_set():
                yield await queue.get()

    async def ListRoutes(self, request: protos.ListRoutesRequest, context: Any) -> protos.ListRoutesReply:
        members = self.conductor.roster.of("reward")
        routes = [protos.Route(name=member.name, address=member.address, live=True, weight=1.0) for member in members]
        return protos.ListRoutesReply(routes=routes)

    async def _ready(self, context: Any) -> None:
        if not self.conductor.ready:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the conductor is starting")
