"""The one way to call a peer: deadline, retry with jitter and a total budget, keepalive, error mapping."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc

from services.errors import PeerError, PeerUnavailable, from_status

Request = TypeVar("Request", contravariant=True)
Reply = TypeVar("Reply", covariant=True)
Result = TypeVar("Result")

MAX_MESSAGE_BYTES = 512 * 1024 * 1024
# keepalive_timeout alone does not end a dead connection: HTTP/2 has a ping timer of its own, one minute by default.
KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a long step or a long answer is silence, and watched too
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
CLIENT_OPTIONS = KEEPALIVE + (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # a restarted peer must not inherit the back-off of the dead one
)
# Without so_reuseport=0 a second server binds a taken port silently and steals half of the traffic.
SERVER_OPTIONS = KEEPALIVE + (
    ("grpc.so_reuseport", 0),
    # A server that expects fewer pings than its peers send ends quiet connections with "Too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_concurrent_streams", 20_000),
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 30_000),
)


class UnaryCall(Protocol[Request, Reply]):
    """A unary method of a stub."""

    def __call__(self, request: Request, /, *, timeout: float) -> Awaitable[Reply]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long to insist."""

    budget_seconds: float = 0.0
    """Time for all attempts together; 0 allows one attempt."""
    first_wait_seconds: float = 0.05
    max_wait_seconds: float = 1.0


ONCE = Retry()


def connect(address: str) -> grpc.aio.Channel:
    """Open a channel (lazily) to host:port."""
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


async def call(
    method: Callable[..., Awaitable[Result]],
    request: object,
    *,
    deadline_seconds: float,
    retry: Retry = ONCE,
    what: str,
) -> Result:
    """Call a unary method of a stub; PeerUnavailable or PeerRefused; never hangs past deadline and budget."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + retry.budget_seconds
    wait = retry.first_wait_seconds
    while True:
        try:
            return await method(request, timeout=deadline_seconds)
        except grpc.aio.AioRpcError as error:
            failure: PeerError = from_status(error, what=what)
        pause = wait * random.uniform(0.5, 1.5)
        if not isinstance(failure, PeerUnavailable) or loop.time() + pause > give_up:
            raise failure
        await asyncio.sleep(pause)
        wait = min(2 * wait, retry.max_wait_seconds)


async def close_all(channels: Sequence[grpc.aio.Channel]) -> None:
    """Close channels at once; calls under way end with CANCELLED."""
    await asyncio.gather(*(channel.close(grace=None) for channel in channels))
