"""A quiet stream lives: a step or an answer may take minutes, and the pings meanwhile must suit both ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

import protos
from services.channel import CLIENT_OPTIONS, SERVER_OPTIONS

QUICKER = 20
"""All times of the options divided by this: two minutes of silence pass in six seconds."""
SILENCE_SECONDS = 120 / QUICKER


def quicker(options: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(name, value // QUICKER if name.endswith("_ms") else value) for name, value in options]


class Silent(protos.ReferenceServicer):
    """A server in the middle of a long piece of work."""

    async def LogProbs(
        self, request_iterator: AsyncIterator[protos.LogProbRequest], context: Any
    ) -> AsyncIterator[protos.LogProbReply]:
        await asyncio.sleep(SILENCE_SECONDS)
        yield protos.LogProbReply(credit=protos.Credit(samples=7))


async def test_two_quiet_minutes_do_not_end_a_stream() -> None:
    server = grpc.aio.server(options=quicker(SERVER_OPTIONS))
    protos.add_ReferenceServicer_to_server(Silent(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=quicker(CLIENT_OPTIONS)) as channel:
            stream = protos.ReferenceStub(channel).LogProbs()
            await stream.write(protos.LogProbRequest())
            reply = await asyncio.wait_for(stream.read(), timeout=SILENCE_SECONDS + 5)
            assert isinstance(reply, protos.LogProbReply) and reply.credit.samples == 7
    finally:
        await server.stop(grace=None)
