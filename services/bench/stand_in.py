"""One rollout service as users start it, and what stands where a conductor would: it hands out the config."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

import protos
from services.channel import SERVER_OPTIONS
from services.commands.lineup import rollout_posts
from services.errors import OffbeatError
from services.launch import environment, tail
from services.roster import Member

if TYPE_CHECKING:
    from services.commands.lineup import Post
    from services.config import Config

START_SECONDS = 400.0
LEAVE_SECONDS = 20.0
NAME = "rollout-0"


class StandIn(protos.ConductorServicer):
    """Whoever asks gets the config, whoever joins is welcome. What it does not answer is UNIMPLEMENTED."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.joined: asyncio.Future[protos.JoinRequest] = asyncio.get_running_loop().create_future()

    async def RunConfig(self, request: protos.RunConfigRequest, context: Any) -> protos.RunConfigReply:
        text = self.config.model_dump_json()
        return protos.RunConfigReply(config_json=text, run_id="bench", run_folder=str(self.folder.resolve()))

    async def Join(self, request: protos.JoinRequest, context: Any) -> protos.JoinReply:
        if not self.joined.done():
            self.joined.set_result(request)
        return protos.JoinReply(run_id="bench", incarnation=1, heartbeat_seconds=1.0)

    async def Heartbeat(self, request: protos.HeartbeatRequest, context: Any) -> protos.HeartbeatReply:
        return protos.HeartbeatReply(known=True)

    async def Leave(self, request: protos.LeaveRequest, context: Any) -> protos.LeaveReply:
        return protos.LeaveReply()


@asynccontextmanager
async def rollout_service(config: Config, folder: Path, *, gpus: str | None) -> AsyncIterator[Member]:
    """A rollout server in a process of its own, ready for leases; it is drained at the end."""
    stand_in = StandIn(config, folder)  # type: ignore[abstract]
    server = grpc.aio.server(options=SERVER_OPTIONS)
    protos.add_ConductorServicer_to_server(stand_in, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    post, log = next(rollout_posts(config)), folder / f"{NAME}.out"
    process = started(post, address, folder, log=log, gpus=gpus)
    try:
        yield await has_joined(stand_in, process, log)
    finally:
        await asyncio.to_thread(end, process)
        await server.stop(grace=0.5)


def started(post: Post, address: str, folder: Path, *, log: Path, gpus: str | None) -> subprocess.Popen[bytes]:
    command = [post.python, "-P", "-m", "services.cli", "serve", "rollout", "--name", NAME]
    command += ["--folder", str(folder), "--join", address, *post.overrides]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(post.threads, gpus),
            start_new_session=True,
        )


async def has_joined(stand_in: StandIn, process: subprocess.Popen[bytes], log: Path) -> Member:
    """Wait until the server has loaded and joined; OffbeatError with the end of its log where it does not."""
    give_up = asyncio.get_running_loop().time() + START_SECONDS
    while not stand_in.joined.done():
        if process.poll() is not None:
            raise OffbeatError(f"the rollout service ended with exit code {process.returncode}:\n{tail(log)}")
        if asyncio.get_running_loop().time() > give_up:
            raise OffbeatError(f"the rollout service was not there in {START_SECONDS:g} s:\n{tail(log)}")
        await asyncio.sleep(0.05)
    request = stand_in.joined.result()
    return Member(NAME, "rollout", request.address, request.process_id, request.identity, 0.0)


def end(process: subprocess.Popen[bytes]) -> None:
    """Drain; a server that does not leave is killed with the processes of its engine."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
