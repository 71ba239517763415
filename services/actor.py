"""The one way to serve: one loop, one server, health, Hello, drain, one compute thread.

bind (a taken port is told before anything heavy is loaded) -> setup -> serving -> drain -> closed
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import protos
from services.channel import SERVER_OPTIONS
from services.errors import OffbeatError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
PACKAGE_VERSION = "0.1.0"
LIVENESS = "liveness"
UNWIND_SECONDS = 0.05
"""gRPC's own tasks end in the turns after a server has stopped; a loop that closes before prints their tracebacks."""
GRACE_SECONDS = 10.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Where an actor listens and how peers call it."""

    name: str
    """Unique in the run, e.g. rollout-0."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    advertise: str | None = None
    """Host under which peers reach it; default: `host`."""
    reflection: bool = True
    """Answer gRPC reflection (development)."""


class Actor(protos.ControlServicer):
    """A service. Subclasses give `register`, `setup`, `work` and `finish`; state changes only inside its loop."""

    role: ClassVar[str] = ""

    def __init__(self, bind: Bind) -> None:
        self.bind = bind
        self.name = bind.name
        self.process_id = secrets.token_hex(8)
        self.identity = protos.Identity(
            protocol_major=protos.PROTOCOL_MAJOR,
            protocol_minor=protos.PROTOCOL_MINOR,
            role=self.role,
            name=bind.name,
            package_version=PACKAGE_VERSION,
        )
        self.address = ""
        self.draining = asyncio.Event()
        self.grace_seconds = GRACE_SECONDS
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{bind.name}-compute")

    # What a subclass gives.

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Add the role's servicer; return its full service names (for reflection)."""
        raise AssertionError(f"{type(self).__name__} registers no service")

    async def setup(self) -> None:
        """Load what is heavy. Health answers NOT_SERVING meanwhile."""

    async def work(self) -> None:
        """Run in the background until cancelled."""
        await self.draining.wait()

    async def finish(self) -> None:
        """Finish or hand back what is in hand; called once, before the server stops."""

    def in_hand(self) -> int:
        """Samples that would be finished or handed back by a drain."""
        return 0

    # Life.

    async def run(self) -> None:
        """Live from bind to close."""
        try:
            await self.open()
            await self._live()
        finally:
            await self.close()

    async def open(self) -> None:
        """Bind and answer; raises OffbeatError with the address where the port is taken."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        protos.add_ControlServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*self.register(server), "offbeat.v1.Control", health.SERVICE_NAME)
        if self.bind.reflection:
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        wanted = f"{self.bind.host}:{self.bind.port}"
        try:
            port = server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise OffbeatError(f"{self.name}: cannot listen on {wanted}: the address is in use or not ours") from error
        self._server = server
        self.address = f"{self.bind.advertise or self.bind.host}:{port}"
        await self._health.set("", NOT_SERVING)
        await self._health.set(LIVENESS, SERVING)
        await server.start()
        logger.info("listening", extra={"facts": {"address": self.address}})

    async def serving(self, ready: bool) -> None:
        """Tell the health service whether this actor takes work."""
        await self._health.set("", SERVING if ready else NOT_SERVING)

    async def close(self) -> None:
        """Stop the server and the compute thread; safe to call twice."""
        await self.serving(False)
        if self._server is not None:
            await self._server.stop(grace=0.5)
            self._server = None
            await asyncio.sleep(UNWIND_SECONDS)
        self._compute.shutdown(wait=False, cancel_futures=True)

    async def _live(self) -> None:
        drained = asyncio.create_task(self.draining.wait(), name=f"{self.name}-drained")
        setup = worker = asyncio.create_task(self.setup(), name=f"{self.name}-setup")
        try:
            await asyncio.wait({setup, drained}, return_when=asyncio.FIRST_COMPLETED)
            if not setup.done():  # told to leave before it was there
                return
            setup.result()
            worker = asyncio.create_task(self.work(), name=f"{self.name}-work")
            await asyncio.wait({worker, drained}, return_when=asyncio.FIRST_COMPLETED)
            if worker.done():
                worker.result()
            await self.serving(False)
            async with asyncio.timeout(self.grace_seconds):
                await self.finish()
        except TimeoutError:
            logger.warning("drain ran out of its grace", extra={"facts": {"in_hand": self.in_hand()}})
        finally:
            await cancel(worker, drained)

    async def compute(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run blocking work on the actor's one compute thread."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, function, *arguments)

    # Control.

    async def Hello(self, request: protos.HelloRequest, context: Any) -> protos.HelloReply:
        problem = mismatch(self.identity, request.identity)
        if problem:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        return protos.HelloReply(identity=self.identity)

    async def Drain(self, request: protos.DrainRequest, context: Any) -> protos.DrainReply:
        count = self.in_hand()
        self.drain(grace_seconds=request.grace_seconds or GRACE_SECONDS)
        return protos.DrainReply(in_hand=count)

    def drain(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """Begin to leave; `run` returns when the work in hand is done or the grace is over."""
        self.grace_seconds = grace_seconds
        self.draining.set()


def mismatch(ours: protos.Identity, theirs: protos.Identity) -> str:
    """Why two services do not fit together; empty where they do."""
    if theirs.protocol_major != ours.protocol_major:
        return (
            f"protocol {ours.protocol_major}.{ours.protocol_minor} of {ours.name} ({ours.package_version}) does not"
            f" speak {theirs.protocol_major}.{theirs.protocol_minor} of {theirs.name} ({theirs.package_version})"
        )
    for field in ("model_hash", "config_hash"):
        one, other = getattr(ours, field), getattr(theirs, field)
        if one and other and one != other:
            return f"{field} differs: {ours.name} has {one[:16]}, {theirs.name} has {other[:16]}"
    return ""


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end; what they raise meanwhile has been told already."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_until_signalled(actor: Actor) -> None:
    """Run one actor in this process: SIGTERM or SIGINT drains, a second one exits at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if actor.draining.is_set():
            task.cancel()
        actor.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await actor.run()


def run_process(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop."""
    import uvloop

    uvloop.run(main)
