"""One long-lived stream from the conductor to a peer: what goes out is queued, what comes in is posted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from services.actor import cancel
from services.channel import close_all, connect

logger = logging.getLogger(__name__)
Request = TypeVar("Request")
Reply = TypeVar("Reply")
OPEN_SECONDS = 5.0


class Link(Generic[Request, Reply]):
    """A stream to one peer. It ends once; the conductor makes a new one when the peer joins again."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        open_stream: Callable[[grpc.aio.Channel], Any],
        on_reply: Callable[[Link[Request, Reply], Reply], None],
        on_end: Callable[[Link[Request, Reply], str], None],
    ) -> None:
        self.name = name
        self.address = address
        self.credit = 0
        """Samples that the peer still takes."""
        self.in_hand = 0
        """Samples that the peer has and has not answered."""
        self.channel = connect(address)
        self._open_stream = open_stream
        self._on_reply = on_reply
        self._on_end = on_end
        self._outgoing: asyncio.Queue[Request] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name=f"link-{name}")
        self._ended = False

    def send(self, request: Request) -> None:
        """Queue a message; the peer's credit, not this queue, bounds what is on its way."""
        self._outgoing.put_nowait(request)

    async def close(self) -> None:
        """End the stream without telling the conductor."""
        self._ended = True
        await cancel(self._task)
        await close_all([self.channel])

    async def _run(self) -> None:
        reason = "the stream ended"
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await self.channel.channel_ready()
            stream = self._open_stream(self.channel)
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(stream))
                await self._read(stream)
                writer.cancel()
        except* (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as errors:
            reason = "; ".join(told(error) for error in errors.exceptions)
        if not self._ended:
            self._ended = True
            self._on_end(self, reason)
            await close_all([self.channel])

    async def _write(self, stream: Any) -> None:
        while True:
            await stream.write(await self._outgoing.get())

    async def _read(self, stream: Any) -> None:
        while (reply := await stream.read()) is not grpc.aio.EOF:
            self._on_reply(self, reply)


def told(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__} {error}".strip()
