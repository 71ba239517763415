"""Sleep and Wake, RPCs of a rollout server whose device somebody else uses meanwhile (services/stages/sharing.py)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

import protos
from services.faults import fault

if TYPE_CHECKING:
    from rollout.engine import Engine


class Sleeping:
    """Mixed into the rollout service. A push may land beside the sleeping engine; its swap wakes it."""

    name: str
    engine: Engine

    def start_awake(self) -> None:
        self.asleep = False
        self.turning = asyncio.Lock()
        """Held while the engine falls asleep, wakes, or takes new weights."""

    async def Sleep(self, request: protos.SleepRequest, context: Any) -> protos.SleepReply:
        async with self.turning:
            try:
                if not self.asleep:
                    await self.engine.sleep()
                self.asleep = True
            except ValueError as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{self.name} cannot sleep: {error}")
        fault(self.name, "rollout.slept")
        return protos.SleepReply()

    async def Wake(self, request: protos.WakeRequest, context: Any) -> protos.WakeReply:
        async with self.turning:
            await self.rouse()
        return protos.WakeReply()

    async def rouse(self) -> None:
        """Wake the engine, if it sleeps; `turning` is held."""
        if self.asleep:
            await self.engine.wake()
            self.asleep = False
