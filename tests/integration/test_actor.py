"""The one way to serve: health, Hello, drain, a taken port, reflection, and bytes that are no message."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import protos
import services.actor
from services.actor import Actor, Bind
from services.channel import SERVER_OPTIONS
from services.errors import OffbeatError
from tests.integration.kit import NOT_SERVING, SERVING, channel_to, health_of, running, until


class Plain(Actor):
    """An actor with nothing but what all have; `go` ends its setup."""

    role = "reward"

    def __init__(self, bind: Bind, *, go: bool = True) -> None:
        super().__init__(bind)
        self.go = asyncio.Event()
        self.finished = False
        self.hangs = False
        if go:
            self.go.set()

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        return ()

    async def setup(self) -> None:
        await self.go.wait()
        await self.serving(True)

    async def finish(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        self.finished = True

    def in_hand(self) -> int:
        return 3


def plain(name: str = "plain-0", *, port: int = 0, go: bool = True) -> Plain:
    return Plain(Bind(name=name, port=port), go=go)


def greeting(*, major: int = protos.PROTOCOL_MAJOR, minor: int = 7, model_hash: str = "") -> protos.HelloRequest:
    identity = protos.Identity(
        protocol_major=major, protocol_minor=minor, name="guest", package_version="9.9", model_hash=model_hash
    )
    return protos.HelloRequest(identity=identity)


async def test_hello_says_who_is_there_and_another_minor_version_is_fine() -> None:
    async with running(plain()) as actor, channel_to(actor.address) as channel:
        reply = await protos.ControlStub(channel).Hello(greeting(), timeout=5.0)
        assert (reply.identity.name, reply.identity.role) == ("plain-0", "reward")


async def test_another_major_version_is_refused_with_both_versions_told() -> None:
    async with running(plain()) as actor, channel_to(actor.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await protos.ControlStub(channel).Hello(greeting(major=2), timeout=5.0)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == "protocol 1.0 of plain-0 (0.1.0) does not speak 2.7 of guest (9.9)"


async def test_another_model_is_refused_with_both_hashes_told() -> None:
    async with running(plain()) as actor, channel_to(actor.address) as channel:
        actor.identity.model_hash = "a" * 64
        await protos.ControlStub(channel).Hello(greeting(model_hash="a" * 64), timeout=5.0)
        with pytest.raises(grpc.aio.AioRpcError, match=r"model_hash differs: plain-0 has a{16}, guest has b{16}"):
            await protos.ControlStub(channel).Hello(greeting(model_hash="b" * 64), timeout=5.0)


async def test_health_is_not_serving_while_it_loads_and_liveness_is() -> None:
    actor = plain(go=False)
    task = asyncio.create_task(actor.run())
    await until(lambda: bool(actor.address))
    async with channel_to(actor.address) as channel:
        assert await health_of(channel) == NOT_SERVING
        assert await health_of(channel, "liveness") == SERVING
        actor.go.set()
        async with asyncio.timeout(5):
            while await health_of(channel) != SERVING:
                await asyncio.sleep(0.005)
    actor.drain()
    await task


async def test_drain_says_what_is_in_hand_and_ends_the_actor() -> None:
    actor = plain()
    task = asyncio.create_task(actor.run())
    await until(lambda: bool(actor.address))
    async with channel_to(actor.address) as channel:
        reply = await protos.ControlStub(channel).Drain(protos.DrainRequest(), timeout=5.0)
    assert reply.in_hand == 3
    async with asyncio.timeout(5):
        await task
    assert actor.finished, "a drain without a grace of its own has the usual one"


async def test_a_finish_that_hangs_is_cut_off_after_its_grace() -> None:
    actor = plain()
    actor.hangs = True
    began = time.monotonic()
    async with running(actor), channel_to(actor.address) as channel:
        await protos.ControlStub(channel).Drain(protos.DrainRequest(grace_seconds=0.2), timeout=5.0)
        await until(actor.draining.is_set)
        actor.drain = lambda *, grace_seconds=0.2: None  # type: ignore[method-assign]
    assert not actor.finished
    assert time.monotonic() - began < 5.0


async def test_what_setup_dies_of_is_raised_and_the_port_is_free_again() -> None:
    class Broken(Plain):
        async def setup(self) -> None:
            raise OffbeatError("no model there")

    actor = Broken(Bind(name="broken-0"))
    with pytest.raises(OffbeatError, match="no model there"):
        await actor.run()
    port = int(actor.address.rpartition(":")[2])
    async with running(plain(port=port)):
        pass


async def test_a_taken_port_is_told_with_its_address_at_once() -> None:
    async with running(plain()) as first:
        port = int(first.address.rpartition(":")[2])
        began = time.monotonic()
        with pytest.raises(OffbeatError, match=f"second-0: cannot listen on 127.0.0.1:{port}"):
            await plain("second-0", port=port).run()
        assert time.monotonic() - began < 2.0


async def test_without_the_option_a_second_server_would_take_half_of_the_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Holds the test above to its cause: gRPC shares a port by default and tells nobody."""
    options = tuple(option for option in SERVER_OPTIONS if option[0] != "grpc.so_reuseport")
    monkeypatch.setattr(services.actor, "SERVER_OPTIONS", options)
    async with (
        running(plain()) as first,
        running(plain("second-0", port=int(first.address.rpartition(":")[2]))) as second,
    ):
        assert first.address == second.address


async def test_reflection_lists_the_services_and_can_be_left_out() -> None:
    async with running(plain()) as actor, channel_to(actor.address) as channel:
        names = await reflected(channel)
    assert {"offbeat.v1.Control", "grpc.health.v1.Health"} <= names
    async with running(Plain(Bind(name="p", reflection=False))) as actor, channel_to(actor.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected(channel)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def reflected(channel: grpc.aio.Channel) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # its stubs know no asyncio
    stream = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]), timeout=5.0)
    replies = [reply async for reply in stream]
    return {service.name for service in replies[0].list_services_response.service}


@pytest.mark.parametrize("body", [b"\xff" * 8, b"\x0a\xff\xff\xff\xff\x0f", b"\x08"])
async def test_bytes_that_are_no_message_get_an_error_and_the_server_lives(body: bytes) -> None:
    async with running(plain()) as actor, channel_to(actor.address) as channel:
        hello = channel.unary_unary("/offbeat.v1.Control/Hello", request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hello(body, timeout=5.0)
        assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        await protos.ControlStub(channel).Hello(greeting(), timeout=5.0)
        assert await health_of(channel) == SERVING
