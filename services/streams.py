"""The serving side of a bidirectional stream: one task reads, replies are queued and written in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Generic, TypeVar

from services.actor import cancel

Reply = TypeVar("Reply")


class Outbox(Generic[Reply]):
    """Replies of one stream. What the peer was granted as credit bounds what can pile up here."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Reply] = asyncio.Queue()

    def put(self, reply: Reply) -> None:
        self._queue.put_nowait(reply)

    async def replies(self, reader: Coroutine[Any, Any, None]) -> AsyncIterator[Reply]:
        """Yield what is put, until `reader` ends; its error, if any, ends the stream."""
        reading = asyncio.create_task(reader, name="stream-reader")
        waiting: asyncio.Task[Reply] | None = None
        try:
            while True:
                waiting = asyncio.create_task(self._queue.get(), name="stream-outbox")
                await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    yield waiting.result()
                    continue
                reading.result()
                return
        finally:
            await cancel(reading, *([waiting] if waiting is not None else []))
