"""The one way to call: what is tried again, for how long, and what it is turned into."""

import asyncio

import grpc
import pytest

from services.channel import CLIENT_OPTIONS, SERVER_OPTIONS, Retry, call
from services.errors import PeerError, PeerRefused, PeerUnavailable

NO_METADATA = grpc.aio.Metadata()


def failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, NO_METADATA, NO_METADATA, details="why")


class Method:
    """A unary method that fails with `codes`, one a call, and then answers."""

    def __init__(self, *codes: grpc.StatusCode) -> None:
        self.codes = list(codes)
        self.timeouts: list[float] = []

    async def __call__(self, request: object, *, timeout: float) -> str:
        self.timeouts.append(timeout)
        if self.codes:
            raise failure(self.codes.pop(0))
        return f"answer to {request}"


QUICK = Retry(budget_seconds=5.0, first_wait_seconds=0.001, max_wait_seconds=0.002)


async def test_an_answer_is_handed_on_and_the_deadline_is_given() -> None:
    method = Method()
    assert await call(method, "q", deadline_seconds=1.5, what="asking") == "answer to q"
    assert method.timeouts == [1.5]


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED]
)
async def test_a_peer_that_is_away_is_tried_again(code: grpc.StatusCode) -> None:
    method = Method(code, code)
    assert await call(method, "q", deadline_seconds=1.0, retry=QUICK, what="asking") == "answer to q"
    assert len(method.timeouts) == 3


FINAL = (
    "CANCELLED UNKNOWN INVALID_ARGUMENT NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED FAILED_PRECONDITION ABORTED"
    " OUT_OF_RANGE UNIMPLEMENTED INTERNAL DATA_LOSS UNAUTHENTICATED"
)


@pytest.mark.parametrize("name", FINAL.split())
async def test_every_other_no_is_final(name: str) -> None:
    code = grpc.StatusCode[name]
    method = Method(code)
    with pytest.raises(PeerRefused, match=f"asking: {name}: why") as caught:
        await call(method, "q", deadline_seconds=1.0, retry=QUICK, what="asking")
    assert caught.value.code is code
    assert len(method.timeouts) == 1


async def test_without_a_budget_there_is_one_attempt() -> None:
    method = Method(grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(PeerUnavailable):
        await call(method, "q", deadline_seconds=1.0, what="asking")
    assert len(method.timeouts) == 1


async def test_the_budget_bounds_all_attempts_together() -> None:
    method = Method(*[grpc.StatusCode.UNAVAILABLE] * 10_000)
    retry = Retry(budget_seconds=0.05, first_wait_seconds=0.005, max_wait_seconds=0.01)
    began = asyncio.get_running_loop().time()
    with pytest.raises(PeerUnavailable):
        await call(method, "q", deadline_seconds=1.0, retry=retry, what="asking")
    assert asyncio.get_running_loop().time() - began < 1.0
    assert 3 <= len(method.timeouts) <= 25


async def test_a_cancelled_call_is_cancelled_and_not_tried_again() -> None:
    async def hang(request: object, *, timeout: float) -> str:
        await asyncio.Event().wait()
        return ""

    task = asyncio.create_task(call(hang, "q", deadline_seconds=1.0, retry=QUICK, what="asking"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_errors_between_services_are_one_family() -> None:
    error = PeerUnavailable("gone", code=grpc.StatusCode.UNAVAILABLE)
    assert isinstance(error, PeerError) and str(error) == "gone"


def test_the_measured_traps_are_set() -> None:
    server, client = dict(SERVER_OPTIONS), dict(CLIENT_OPTIONS)
    assert server["grpc.so_reuseport"] == 0
    assert client["grpc.use_local_subchannel_pool"] == 1
    for options in (server, client):
        assert options["grpc.http2.ping_timeout_ms"] <= options["grpc.keepalive_time_ms"]
