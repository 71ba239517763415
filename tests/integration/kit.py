"""What integration tests are made of: an actor that runs, a conductor that only takes attendance, streams to read."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

import protos
from services.actor import Actor, Bind
from services.channel import connect
from services.roster import Member

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SAMPLING = protos.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=5)
ENDLESS = protos.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=25, ignore_eos=True)
Some = TypeVar("Some", bound=Actor)


@asynccontextmanager
async def running(actor: Some) -> AsyncIterator[Some]:
    """Run an actor until it serves; drain it at the end. What it dies of is raised."""
    task = asyncio.create_task(actor.run(), name=f"run-{actor.name}")
    try:
        await until(lambda: task.done() or bool(actor.address))
        async with channel_to(actor.address) as channel:
            while not task.done() and await health_of(channel) != SERVING:
                await asyncio.sleep(0.01)
        if task.done():
            task.result()
        yield actor
    finally:
        actor.drain(grace_seconds=5.0)
        await task


@asynccontextmanager
async def serving(*register: Callable[[grpc.aio.Server], None], port: int = 0) -> AsyncIterator[str]:
    """A bare server of the given servicers; yields its address."""
    server = grpc.aio.server()
    for add in register:
        add(server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    channel = connect(address)
    try:
        yield channel
    finally:
        await channel.close()


async def health_of(channel: grpc.aio.Channel, service: str = "") -> int:
    check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # its stubs leave it out
    reply = await check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
    return int(reply.status)


async def until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Wait until something has happened; TimeoutError where it does not."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Attendance(protos.ConductorServicer):
    """Stands where a conductor would: whoever joins is welcome and beats into the void."""

    def __init__(self) -> None:
        self.joined: list[protos.JoinRequest] = []
        self.left: list[str] = []
        self.beats = 0
        self.known = True
        self.finished = False
        self.heartbeat_seconds = 5.0

    async def Join(self, request: protos.JoinRequest, context: Any) -> protos.JoinReply:
        self.joined.append(request)
        return protos.JoinReply(run_id="run", incarnation=1, heartbeat_seconds=self.heartbeat_seconds)

    async def Heartbeat(self, request: protos.HeartbeatRequest, context: Any) -> protos.HeartbeatReply:
        self.beats += 1
        return protos.HeartbeatReply(known=self.known, finished=self.finished)

    async def Leave(self, request: protos.LeaveRequest, context: Any) -> protos.LeaveReply:
        self.left.append(request.name)
        return protos.LeaveReply()


@asynccontextmanager
async def attendance() -> AsyncIterator[tuple[str, Attendance]]:
    """(address, who came and went)."""
    desk = Attendance()  # type: ignore[abstract]  # what it does not answer is UNIMPLEMENTED
    async with serving(lambda server: protos.add_ConductorServicer_to_server(desk, server)) as address:
        yield address, desk


class Talk:
    """A bidirectional stream from the client's end; replies are collected by what they hold."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.replies: list[Any] = []
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for reply in self.stream:
            self.replies.append(reply)

    async def say(self, request: Any) -> None:
        await self.stream.write(request)

    def credit(self) -> int:
        return sum(reply.credit.samples for reply in self.replies)

    def heard(self, field: str) -> list[Any]:
        return [item for reply in self.replies for item in getattr(reply, field)]

    async def hear(self, field: str, count: int) -> list[Any]:
        """Wait until `count` items of a repeated field have come."""
        await until(lambda: len(self.heard(field)) >= count or self._task.done())
        assert len(self.heard(field)) == count, self._task
        return self.heard(field)

    async def hang_up(self) -> None:
        """The client goes away without a word."""
        self.stream.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def talking(open_stream: Callable[[], Any]) -> AsyncIterator[Talk]:
    talk = Talk(open_stream())
    try:
        yield talk
    finally:
        await talk.hang_up()


def bind(name: str) -> Bind:
    return Bind(name=name)


def lease(
    group: int, *, count: int = 2, lease_id: int = 0, text: str = "12+34=", sampling: protos.SamplingParams = SAMPLING
) -> protos.GroupLease:
    return protos.GroupLease(
        lease_id=lease_id or group + 100,
        group=group,
        prompt=protos.Prompt(prompt_id="p", text=text),
        indices=range(count),
        seeds=[1000 * group + index for index in range(count)],
        attempts=[1] * count,
        sampling=sampling,
        ttl_ms=60_000,
    )


def member(name: str, address: str) -> Member:
    return Member(name, "any", address, "process", protos.Identity(), 0.0)
