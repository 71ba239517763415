"""A rollout server gives its memory back and takes it again; what is leased meanwhile waits, and a push wakes it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import protos
from services.config import Config
from tests.integration.kit import ENDLESS, channel_to, lease, talking
from tests.integration.test_push import addresses, holds, new_pusher, outgoing_of, servers, status_of

MakeConfig = Callable[..., Config]
SILENT_SECONDS = 0.3


async def sleep(stub: Any) -> None:
    await stub.Sleep(protos.SleepRequest(), timeout=5.0)


async def wake(stub: Any) -> None:
    await stub.Wake(protos.WakeRequest(), timeout=5.0)


async def test_a_sleeping_server_decodes_nothing_and_goes_on_when_it_is_woken(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    async with servers(make_config, tmp_path, 1) as (service,), channel_to(service.address) as channel:
        stub = protos.RolloutStub(channel)
        await sleep(stub)
        await sleep(stub)  # who did not hear the answer may ask again
        status = await status_of(service)
        assert status.asleep and not status.serving
        async with talking(stub.Generate) as talk:
            await talk.say(protos.GenerateRequest(leases=[lease(0, count=2, sampling=ENDLESS)]))
            await asyncio.sleep(SILENT_SECONDS)
            assert talk.heard("trajectories") == [] and (await status_of(service)).num_running == 2
            await wake(stub)
            await wake(stub)
            assert len(await talk.hear("trajectories", 2)) == 2
        assert not (await status_of(service)).asleep


async def test_a_sleeping_server_takes_a_push_and_is_awake_with_it(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    outgoing = outgoing_of(model_folder)
    pusher = new_pusher(outgoing, tmp_path)
    async with servers(make_config, tmp_path, 1) as (service,), channel_to(service.address) as channel:
        stub = protos.RolloutStub(channel)
        await pusher.set_members(addresses([service]))
        for version, transport in ((1, "gloo"), (2, "gloo"), (3, "disk")):
            await sleep(stub)
            assert (await status_of(service)).asleep
            report = await pusher.push(version, transport=transport)
            assert list(report.committed) == ["rollout-0"] and not report.failed
            assert await holds(service, outgoing, version)
            assert not (await status_of(service)).asleep
        async with talking(stub.Generate) as talk:
            await talk.say(protos.GenerateRequest(leases=[lease(0, count=2)]))
            trajectories = await talk.hear("trajectories", 2)
        assert {span.policy_version for one in trajectories for span in one.spans} == {3}
        await pusher.set_members([])


async def test_an_engine_that_cannot_sleep_says_why(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cannot() -> None:
        raise ValueError("vllm.enable_sleep_mode is off")

    async with servers(make_config, tmp_path, 1) as (service,), channel_to(service.address) as channel:
        monkeypatch.setattr(service.engine, "sleep", cannot)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await sleep(protos.RolloutStub(channel))
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error.value.details() == "rollout-0 cannot sleep: vllm.enable_sleep_mode is off"
        assert not (await status_of(service)).asleep
