"""The conductor's desk over real calls: who is taken in, fenced off or lost, and how it ends when it cannot go on."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import protos
from services.actor import Bind
from services.compose import load_json
from services.conductor import Conductor
from services.config import Config
from services.errors import ConfigError, Replaced
from services.reward import RewardService
from tests.integration.kit import Attendance, attendance, bind, channel_to, running, serving, until

MakeConfig = Callable[..., Config]


def conductor_of(config: Config, folder: Path) -> Conductor:
    return Conductor(Bind(name="conductor"), config, folder=folder / "run")


def join(
    name: str, process_id: str, *, role: str = "reward", incarnation: int = 0, major: int = 1, model_hash: str = ""
) -> protos.JoinRequest:
    identity = protos.Identity(protocol_major=major, role=role, name=name, model_hash=model_hash)
    return protos.JoinRequest(identity=identity, address="127.0.0.1:1", process_id=process_id, incarnation=incarnation)


def beat(name: str, process_id: str) -> protos.HeartbeatRequest:
    return protos.HeartbeatRequest(name=name, process_id=process_id)


async def refusal(call: Any) -> str:
    """What a call is refused with, as failed precondition."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return str(caught.value.details())


async def test_the_newest_process_of_a_name_stays_and_the_older_one_is_told(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    async with running(conductor_of(make_config(), tmp_path)) as conductor, channel_to(conductor.address) as channel:
        stub = protos.ConductorStub(channel)
        await stub.Join(join("reward-0", "a"), timeout=5.0)
        await stub.Join(join("reward-0", "b"), timeout=5.0)
        assert not (await stub.Heartbeat(beat("reward-0", "a"), timeout=5.0)).known
        assert "process b has taken over as reward-0" in await refusal(stub.Join(join("reward-0", "a"), timeout=5.0))
        await stub.Leave(protos.LeaveRequest(name="reward-0", process_id="a"), timeout=5.0)
        assert conductor.roster.members["reward-0"].process_id == "b", "the goodbye of the older one is not the newer's"


async def test_a_second_trainer_fences_the_first_off(make_config: MakeConfig, tmp_path: Path) -> None:
    async with running(conductor_of(make_config(), tmp_path)) as conductor, channel_to(conductor.address) as channel:
        stub = protos.ConductorStub(channel)
        first = await stub.Join(join("trainer", "a", role="trainer"), timeout=5.0)
        second = await stub.Join(join("trainer-2", "b", role="trainer"), timeout=5.0)
        assert (first.incarnation, second.incarnation) == (1, 2)
        assert [member.name for member in conductor.roster.of("trainer")] == ["trainer-2"]
        again = join("trainer", "a", role="trainer", incarnation=1)
        assert "incarnation 1 is fenced off: incarnation 2" in await refusal(stub.Join(again, timeout=5.0))
        known = await stub.Join(join("trainer-2", "b", role="trainer", incarnation=2), timeout=5.0)
        assert known.incarnation == 2, "the one that lives keeps its number"


async def test_incarnations_go_on_after_the_conductor_came_back(make_config: MakeConfig, tmp_path: Path) -> None:
    for expected in (1, 2):
        async with running(conductor_of(make_config(), tmp_path)) as conductor:
            async with channel_to(conductor.address) as channel:
                reply = await protos.ConductorStub(channel).Join(join("trainer", "a", role="trainer"), timeout=5.0)
            assert reply.incarnation == expected
            run_id = conductor.run_id
        assert run_id == conductor.run_id


async def test_who_does_not_fit_is_refused_with_the_difference(make_config: MakeConfig, tmp_path: Path) -> None:
    async with running(conductor_of(make_config(), tmp_path)) as conductor, channel_to(conductor.address) as channel:
        stub = protos.ConductorStub(channel)
        assert "does not speak 2.0" in await refusal(stub.Join(join("reward-0", "a", major=2), timeout=5.0))
        assert "no such role: 'cook'" in await refusal(stub.Join(join("cook-0", "a", role="cook"), timeout=5.0))
        await stub.Join(join("rollout-0", "a", role="rollout", model_hash="a" * 64), timeout=5.0)
        other = join("rollout-1", "b", role="rollout", model_hash="b" * 64)
        assert "model_hash differs: rollout-0 has aaaa" in await refusal(stub.Join(other, timeout=5.0))
        assert list(conductor.roster.members) == ["rollout-0"]


async def test_a_member_that_falls_silent_is_lost_and_may_join_again(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(conductor={"heartbeat_seconds": 0.05})
    async with running(conductor_of(config, tmp_path)) as conductor, channel_to(conductor.address) as channel:
        stub = protos.ConductorStub(channel)
        await stub.Join(join("reward-0", "a"), timeout=5.0)
        assert (await stub.Heartbeat(beat("reward-0", "a"), timeout=5.0)).known
        await until(lambda: not conductor.roster.members)
        assert not (await stub.Heartbeat(beat("reward-0", "a"), timeout=5.0)).known
        status = await stub.Status(protos.ConductorStatusRequest(), timeout=5.0)
        assert status.state == "waiting_trainer"
        await stub.Join(join("reward-0", "a"), timeout=5.0)
        assert "reward-0" in conductor.roster.members


async def test_a_broken_stream_does_not_lose_who_has_joined_anew(make_config: MakeConfig, tmp_path: Path) -> None:
    async with running(conductor_of(make_config(), tmp_path)) as conductor:
        conductor.admit(join("reward-0", "a"))
        conductor.stream_ended("reward-0", "the stream of before")
        assert conductor.roster.members["reward-0"].process_id == "a"
        await until(lambda: "reward-0" in conductor.judging.station.links)
        conductor.stream_ended("reward-0", "this stream")
        assert conductor.roster.members == {}


async def test_a_service_finds_the_run_s_config_through_the_conductor(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    async with running(conductor_of(config, tmp_path)) as conductor:
        async with channel_to(conductor.address) as channel:
            reply = await protos.ConductorStub(channel).RunConfig(protos.RunConfigRequest(), timeout=5.0)
        assert load_json(reply.config_json) == config
        async with running(RewardService(bind("reward-0"), conductor=conductor.address)) as service:
            assert service.config == config and service.folder == conductor.folder.resolve()
            await until(lambda: "reward-0" in conductor.judging.station.links)
        await until(lambda: not conductor.roster.members)


async def test_a_setup_that_fails_closes_its_files_and_a_better_one_finds_the_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    conductor = conductor_of(make_config(data={"type": "file", "path": str(bad), "size": None}), tmp_path)
    with pytest.raises(ConfigError, match="cannot be used"):
        await conductor.run()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        await conductor.ledger.durable()
    assert "ledger" not in {thread.name for thread in threading.enumerate()}
    async with running(conductor_of(make_config(), tmp_path)) as better:
        assert better.run_id == conductor.run_id


async def test_a_ledger_that_cannot_write_ends_the_conductor(make_config: MakeConfig, tmp_path: Path) -> None:
    conductor = conductor_of(make_config(), tmp_path)
    task = asyncio.create_task(conductor.run())
    await until(lambda: conductor.ready)
    conductor.ledger._committer.problem = sqlite3.OperationalError("database or disk is full")
    async with asyncio.timeout(5):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            await task


async def test_events_are_told_to_whoever_watches(make_config: MakeConfig, tmp_path: Path) -> None:
    async with running(conductor_of(make_config(), tmp_path)) as conductor, channel_to(conductor.address) as channel:
        stub = protos.ConductorStub(channel)
        watching = stub.Watch(protos.WatchRequest(from_start=True), timeout=10.0)
        await stub.Join(join("reward-0", "a"), timeout=5.0)
        event = await anext(aiter(watching))
        assert (event.kind, event.service) == ("joined", "reward-0")
        watching.cancel()


# The other side: a service and its conductor.


async def test_a_service_that_is_not_known_any_more_joins_again(make_config: MakeConfig, tmp_path: Path) -> None:
    async with attendance() as (address, desk):
        desk.heartbeat_seconds = 0.05
        service = RewardService(bind("reward-0"), conductor=address, config=make_config(), folder=tmp_path)
        async with running(service):
            assert len(desk.joined) == 1
            desk.known = False
            await until(lambda: len(desk.joined) > 1)
            desk.known = True
        assert len({request.process_id for request in desk.joined}) == 1
    assert desk.left == ["reward-0"]


async def test_a_service_whose_place_is_taken_ends_and_says_so(make_config: MakeConfig, tmp_path: Path) -> None:
    class Full(Attendance):
        async def Join(self, request: protos.JoinRequest, context: Any) -> protos.JoinReply:
            if self.joined:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "process b has taken over")
            return await super().Join(request, context)

    desk = Full()  # type: ignore[abstract]
    desk.heartbeat_seconds, desk.known = 0.05, False
    async with serving(lambda server: protos.add_ConductorServicer_to_server(desk, server)) as address:
        service = RewardService(bind("reward-0"), conductor=address, config=make_config(), folder=tmp_path)
        with pytest.raises(Replaced, match="process b has taken over"):
            await service.run()


async def test_a_conductor_that_is_away_is_waited_for_and_found_again(make_config: MakeConfig, tmp_path: Path) -> None:
    async with attendance() as (address, first):
        first.heartbeat_seconds = 0.05
        service = RewardService(bind("reward-0"), conductor=address, config=make_config(), folder=tmp_path)
        task = asyncio.create_task(service.run())
        await until(lambda: first.beats > 1)
    await asyncio.sleep(0.2)
    assert not task.done()
    second = Attendance()  # type: ignore[abstract]
    second.known = False
    port = int(address.rpartition(":")[2])
    async with serving(lambda server: protos.add_ConductorServicer_to_server(second, server), port=port):
        await until(lambda: len(second.joined) > 0)
        service.drain()
        await task
    assert second.left == ["reward-0"]


async def test_a_finished_run_lets_its_services_go(make_config: MakeConfig, tmp_path: Path) -> None:
    async with attendance() as (address, desk):
        desk.heartbeat_seconds = 0.05
        service = RewardService(bind("reward-0"), conductor=address, config=make_config(), folder=tmp_path)
        task = asyncio.create_task(service.run())
        await until(lambda: desk.beats > 0)
        desk.finished = True
        async with asyncio.timeout(10):
            await task
    assert desk.left == ["reward-0"]
