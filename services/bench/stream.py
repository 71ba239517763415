"""Messages and bytes a second of the trajectory stream over loopback gRPC, beside bare bytes of the same size."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import protos
from protos.arrays import to_array
from services.bench.report import spread, write
from services.channel import SERVER_OPTIONS, connect

SIZES = {"demo": (6, 4, 64), "reasoning": (512, 4096, 16)}
"""name -> (prompt tokens, response tokens, trajectories a message)."""
SECONDS = 2.0


class Source(protos.RolloutServicer):
    """Streams the same reply until the client goes away."""

    def __init__(self, reply: protos.GenerateReply) -> None:
        self.reply = reply

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[protos.GenerateReply]:
        while True:
            yield self.reply


def bench_stream(*, rounds: int, out: Path | None) -> int:
    """Trajectories as messages against the same bytes with nothing to parse, in alternating pairs."""
    import uvloop

    figures = {name: uvloop.run(one_size(size, rounds=rounds)) for name, size in SIZES.items()}
    return write(out, "stream", {"rounds": rounds, "seconds_each": SECONDS, "sizes": figures})


async def one_size(size: tuple[int, int, int], *, rounds: int) -> dict[str, Any]:
    reply = protos.GenerateReply(trajectories=[trajectory(*size[:2]) for _ in range(size[2])])
    server = grpc.aio.server(options=SERVER_OPTIONS)
    protos.add_RolloutServicer_to_server(Source(reply), server)  # type: ignore[abstract]  # one method is asked
    server.add_generic_rpc_handlers((raw_handler(reply.SerializeToString()),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = connect(f"127.0.0.1:{port}")
    parsed, raw = [], []
    for _ in range(rounds + 1):
        parsed.append(await rate(lambda: protos.RolloutStub(channel).Generate()))
        raw.append(await rate(lambda: channel.stream_stream("/bench/Raw")()))
    await channel.close()
    await server.stop(None)
    num_bytes = reply.ByteSize()
    return {
        "bytes_per_message": num_bytes,
        "trajectories_per_message": size[2],
        "messages_per_s": spread(parsed[1:], digits=0),
        "mb_per_s": spread([one * num_bytes / 1e6 for one in parsed[1:]], digits=1),
        "trajectories_per_s": spread([one * size[2] for one in parsed[1:]], digits=0),
        "raw_messages_per_s": spread(raw[1:], digits=0),
        "raw_mb_per_s": spread([one * num_bytes / 1e6 for one in raw[1:]], digits=1),
    }


async def rate(open_stream: Callable[[], Any]) -> float:
    """Messages a second read from a stream."""
    stream = open_stream()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        await stream.read()
        count += 1
    stream.cancel()
    return count / (time.perf_counter() - began)


def raw_handler(payload: bytes) -> grpc.GenericRpcHandler:
    async def serve(request_iterator: Any, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield payload

    return grpc.method_handlers_generic_handler("bench", {"Raw": grpc.stream_stream_rpc_method_handler(serve)})


def trajectory(prompt_tokens: int, response_tokens: int) -> protos.Trajectory:
    return protos.Trajectory(
        key=protos.SampleKey(group=1, index=1),
        lease_id=1,
        prompt_ids=to_array(np.arange(prompt_tokens, dtype=np.int32)),
        response_ids=to_array(np.arange(response_tokens, dtype=np.int32)),
        behaviour_logprobs=to_array(np.full(response_tokens, -0.5, dtype=np.float32)),
        spans=[protos.VersionSpan(policy_version=1, num_tokens=response_tokens)],
        response_text="x" * response_tokens,
        server="rollout-0",
    )
