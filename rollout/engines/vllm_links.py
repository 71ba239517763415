"""The engine's end of the push sockets: one connection from each of vLLM's workers (vllm_link.py is the other end)."""

import asyncio
import json
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollout.engine import TransferFailed
from rollout.engines.vllm_link import HEADER, PATH_VARIABLE, Kind, frame

logger = logging.getLogger(__name__)
GONE = "a worker of vLLM is gone"
ANSWER_SECONDS = 10.0


class Peer:
    """One worker. What it says about another push than the current one is ignored."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.gpu = ""
        self._push = -1
        self._replies: dict[Kind, asyncio.Future[bytes]] = {}
        self._gone = False

    def ask(self, kind: Kind, push: int, payload: bytes, replies: Sequence[Kind]) -> None:
        """Send, and be ready for these replies."""
        loop = asyncio.get_running_loop()
        for reply in self._replies:
            self._fail(reply, "the push was dropped")
        self._push = push
        self._replies = {reply: loop.create_future() for reply in replies}
        if self._gone:
            self.lose()
        else:
            self._writer.write(frame(kind, push, payload))

    async def reply(self, kind: Kind) -> bytes:
        """Payload of a reply; TransferFailed. It may be asked for again."""
        future = self._replies.get(kind)
        if future is None:
            raise TransferFailed("no push is open")
        return await asyncio.shield(future)

    def take(self, kind: Kind, push: int, payload: bytes) -> None:
        """Called by the reader of this connection."""
        if push != self._push:
            return
        if kind == Kind.FAILED:
            self._fail(Kind.ARRIVED, payload.decode(errors="replace"))
        elif (future := self._replies.get(kind)) is not None and not future.done():
            future.set_result(payload)

    def lose(self) -> None:
        """The connection is closed: nothing more will come."""
        self._gone = True
        for kind in self._replies:
            self._fail(kind, GONE)

    def _fail(self, kind: Kind, text: str) -> None:
        future = self._replies.get(kind)
        if future is not None and not future.done():
            future.set_exception(TransferFailed(text))
            future.exception()  # nobody may be waiting for it


class Links:
    """All workers, in the order of their ranks. Use: listen, start vLLM, ready; then pushes."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._folder = Path(tempfile.mkdtemp(prefix="offbeat-vllm-"))
        self._peers: dict[int, Peer] = {}
        self._changed = asyncio.Event()
        self._push = 0
        self._server: asyncio.Server | None = None
        self._readers: set[asyncio.Task[None]] = set()

    async def listen(self) -> str:
        """Take connections; the path of the socket, which vLLM's processes find in their environment."""
        path = str(self._folder / "push")
        self._server = await asyncio.start_unix_server(self._meet, path)
        os.environ[PATH_VARIABLE] = path
        return path

    async def ready(self, *, seconds: float) -> None:
        """Wait until all workers have come; TimeoutError."""
        async with asyncio.timeout(seconds):
            while len(self._peers) < self._num_workers:
                self._changed.clear()
                await self._changed.wait()
        self._peers = dict(sorted(self._peers.items()))

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the workers' cards; empty on a CPU."""
        return tuple(dict.fromkeys(peer.gpu for peer in self._peers.values() if peer.gpu))

    async def open(self, request: bytes) -> None:
        """Begin a push on every worker; TransferFailed."""
        self._push += 1
        for peer in self._peers.values():
            peer.ask(Kind.OPEN, self._push, request, (Kind.OPENED, Kind.ARRIVED))
        refusals = await self._all(Kind.OPENED, seconds=ANSWER_SECONDS)
        if any(refusals):
            raise TransferFailed(b"; ".join(filter(None, refusals)).decode(errors="replace"))

    async def arrived(self, *, seconds: float) -> list[list[int]]:
        """Checksums of the buckets that each worker has; TransferFailed."""
        payloads = await self._all(Kind.ARRIVED, seconds=seconds)
        return [list(struct.unpack(f"!{len(payload) // 8}Q", payload)) for payload in payloads]

    async def drop(self) -> None:
        """Every worker forgets the push."""
        await self._tell(Kind.DROP, Kind.DROPPED)

    async def release(self) -> None:
        """Every worker gives its staging memory back. Not while a push is open."""
        await self._tell(Kind.RELEASE, Kind.RELEASED)

    async def _tell(self, kind: Kind, reply: Kind) -> None:
        self._push += 1
        for peer in self._peers.values():
            peer.ask(kind, self._push, b"", (reply,))
        await self._all(reply, seconds=ANSWER_SECONDS)

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _all(self, kind: Kind, *, seconds: float) -> list[bytes]:
        try:
            async with asyncio.timeout(seconds):
                return [await peer.reply(kind) for peer in self._peers.values()]
        except TimeoutError:
            raise TransferFailed(f"vLLM's workers gave no word of {kind.name} within {seconds:g} s") from None

    def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._read(reader, writer), name="offbeat-vllm-push")
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(writer)
        try:
            while True:
                length, kind, push = HEADER.unpack(await reader.readexactly(HEADER.size))
                payload = await reader.readexactly(length)
                if kind == Kind.HELLO:
                    self._welcome(peer, payload)
                else:
                    peer.take(Kind(kind), push, payload)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            logger.debug("a worker's push socket closed: %s", error)
        finally:
            peer.lose()
            writer.close()

    def _welcome(self, peer: Peer, payload: bytes) -> None:
        hello = json.loads(payload)
        peer.gpu = str(hello["gpu"])
        self._peers[int(hello["rank"])] = peer
        self._changed.set()
