"""The rollout service on an engine whose model lives in another process: what it says when that process dies."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import psutil
import pytest

import protos
from services.config import Config
from services.errors import Broken
from services.rollout import RolloutService
from tests.engines.conftest import engine_params
from tests.engines.models import write_model
from tests.engines.served import LONG, engine_config
from tests.integration.kit import SERVING, attendance, bind, channel_to, health_of, lease, talking, until

pytestmark = [pytest.mark.filterwarnings("default")]
HEARTBEAT_SECONDS = 1.0
ENDLESS = protos.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=LONG, ignore_eos=True)
CORES = {"vllm": "VLLM::EngineCore", "sglang": "sglang::scheduler"}
"""What the process that generates calls itself; hf generates in the server's own."""


@pytest.mark.parametrize("engine_name", engine_params(CORES))
async def test_a_dead_engine_process_is_told_within_three_heartbeats(engine_name: str, tmp_path: Path) -> None:
    others = engine_processes(CORES[engine_name])  # of engines that other tests share
    async with attendance() as (conductor, desk):
        desk.heartbeat_seconds = HEARTBEAT_SECONDS
        config = service_config(engine_name, write_model(tmp_path / "model", tied=True), tmp_path)
        service = RolloutService(bind("rollout-0"), conductor=conductor, config=config, folder=tmp_path)
        running = asyncio.create_task(service.run())
        await until(lambda: bool(desk.joined) or running.done(), seconds=120.0)
        async with channel_to(service.address) as channel, talking(protos.RolloutStub(channel).Generate) as talk:
            assert await health_of(channel) == SERVING
            await talk.say(protos.GenerateRequest(leases=[lease(0, count=2)]))
            await talk.hear("trajectories", 2)
            (core,) = set(engine_processes(CORES[engine_name])) - set(others)
            await talk.say(protos.GenerateRequest(leases=[lease(1, count=2, sampling=ENDLESS)]))
            await until(lambda: service.in_hand() == 2)
            core.kill()
            assert await seconds_until_not_serving(channel) < 3 * HEARTBEAT_SECONDS
        with pytest.raises(Broken, match="generation failed"):
            await asyncio.wait_for(running, 30.0)
    assert engine_processes(CORES[engine_name]) == others


def service_config(engine_name: str, model: Path, folder: Path) -> Config:
    rollout = engine_config(engine_name, model, sampling={"max_tokens": 5}).model_dump()
    return Config.model_validate(
        {
            "run": {"name": "t", "folder": str(folder), "num_steps": 2, "prompts_per_step": 2, "group_size": 2},
            "data": {"type": "arithmetic", "size": 50},
            "rollout": rollout,
            "reward": {"functions": [{"target": "arithmetic"}]},
            "trainer": {"model": str(model)},
        }
    )


def engine_processes(title: str) -> Sequence[psutil.Process]:
    """Processes of this title that descend from this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(title in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


async def seconds_until_not_serving(channel: grpc.aio.Channel) -> float:
    """Until health says so, or nobody answers any more."""
    began = time.monotonic()
    try:
        while await health_of(channel) == SERVING:
            assert time.monotonic() - began < 30.0
            await asyncio.sleep(0.02)
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE
    return time.monotonic() - began
