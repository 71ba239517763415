"""The trainer service: pushes and checkpoints that nobody waits for any more, and a push that fails of itself."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import protos
from protos.arrays import to_array
from services.config import Config
from services.errors import Broken
from services.trainer import TrainerService
from tests.integration.kit import attendance, bind, channel_to, running, serving, talking, until

MakeConfig = Callable[..., Config]


class Slow(protos.RolloutServicer):
    """A rollout server that takes its time to begin a push."""

    def __init__(self) -> None:
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self.committed: list[int] = []

    async def BeginPush(self, request: protos.BeginPushRequest, context: Any) -> protos.BeginPushReply:
        self.begun.set()
        await self.gate.wait()
        return protos.BeginPushReply()

    async def CommitPush(self, request: protos.CommitPushRequest, context: Any) -> protos.CommitPushReply:
        self.committed.append(request.policy_version)
        return protos.CommitPushReply()


@asynccontextmanager
async def trainer(config: Config, folder: Path) -> AsyncIterator[tuple[TrainerService, Any]]:
    async with attendance() as (conductor, _):
        service = TrainerService(bind("trainer"), conductor=conductor, config=config, folder=folder)
        async with running(service), channel_to(service.address) as channel:
            yield service, protos.TrainerStub(channel)


async def test_a_push_goes_on_where_the_conductor_gives_up(make_config: MakeConfig, tmp_path: Path) -> None:
    slow = Slow()  # type: ignore[abstract]  # what it does not answer is UNIMPLEMENTED
    async with (
        serving(lambda server: protos.add_RolloutServicer_to_server(slow, server)) as address,
        trainer(make_config(push={"transport": "disk", "deadline_seconds": 10.0}), tmp_path) as (_, stub),
    ):
        newcomer = protos.RolloutAddress(name="rollout-0", address=address, needs_version=True)
        call = stub.SyncRollouts(protos.SyncRolloutsRequest(servers=[newcomer]))
        await slow.begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        slow.gate.set()
        await until(lambda: slow.committed == [0], seconds=5.0)
        again = await stub.SyncRollouts(protos.SyncRolloutsRequest(servers=[]), timeout=5.0)
        assert not again.push.failed


async def test_a_push_that_fails_of_itself_ends_the_service(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("where the folder of pushed weights should be")
    there = protos.RolloutAddress(name="rollout-0", address="127.0.0.1:1")
    with pytest.raises(Broken, match="weights"):
        async with trainer(make_config(push={"transport": "disk"}), tmp_path) as (service, stub):
            await stub.SyncRollouts(protos.SyncRolloutsRequest(servers=[there]), timeout=5.0)
            async with talking(stub.Train) as talk:
                await talk.say(protos.TrainRequest(batch=first_batch()))
                await until(lambda: service._server is None)


async def test_a_checkpoint_is_written_where_its_caller_gives_up(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = threading.Event(), threading.Event()
    async with trainer(make_config(), tmp_path) as (service, stub):
        write = service.part.store.write

        def slow(taken: Any) -> Path:
            begun.set()
            assert gate.wait(20)
            return write(taken)

        monkeypatch.setattr(service.part.store, "write", slow)
        call = stub.Save(protos.SaveRequest())
        await until(begun.is_set)
        call.cancel()
        await stub.Status(protos.TrainerStatusRequest(), timeout=5.0)
        gate.set()
        reply = await stub.Save(protos.SaveRequest(), timeout=5.0)
        assert Path(reply.checkpoint.path).name == "step_0" and not reply.checkpoint.problem


@pytest.mark.parametrize("memory", ["snapshot", "streamed"])
async def test_a_checkpoint_asked_for_during_a_step_is_of_the_step_that_it_holds(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    begun, gate = threading.Event(), threading.Event()
    async with trainer(make_config(push={"memory": memory}), tmp_path) as (service, stub):
        train = service.part.train

        def slow(batch: protos.TrajectoryBatch) -> Any:
            begun.set()
            assert gate.wait(20)
            return train(batch)

        monkeypatch.setattr(service.part, "train", slow)
        async with talking(stub.Train) as talk:
            await talk.say(protos.TrainRequest(batch=first_batch()))
            await until(begun.is_set)
            asked = asyncio.create_task(service.Save(protos.SaveRequest(), None))
            await until(lambda: service._saving.locked())
            gate.set()
            reply = await asyncio.wait_for(asked, 20)
    assert (reply.checkpoint.step, Path(reply.checkpoint.path).name) == (1, "step_1")


def first_batch() -> protos.TrajectoryBatch:
    ones = np.ones(3, np.int32)
    return protos.TrajectoryBatch(
        step=1,
        incarnation=1,
        trajectories=[
            protos.Trajectory(
                key=protos.SampleKey(group=0, index=index),
                prompt_ids=to_array(ones),
                response_ids=to_array(ones),
                behaviour_logprobs=to_array(-np.ones(3, np.float32)),
                reward=float(index),
                spans=[protos.VersionSpan(policy_version=0, num_tokens=3)],
            )
            for index in range(2)
        ],
    )
