"""Time sharing over the wire: when a batch is sent, when servers are synchronized, and who loads when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import protos
from services.config import Config
from services.loading import alone_on_card
from services.records.book import Book
from services.records.ledger import Ledger
from services.rollout import RolloutService
from services.roster import Member
from services.stages.sharing import Sharing
from services.stages.training import Training
from tests.integration.kit import attendance, bind, running, serving, until
from tests.unit.services.life import made_trajectory

MakeConfig = Callable[..., Config]
SILENT_SECONDS = 0.3


class Trainer(protos.TrainerServicer):
    """Notes what it is sent; reports when it is told to."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.received: list[protos.TrajectoryBatch] = []
        self.syncs: list[list[str]] = []
        self.version = 0
        self.replies: asyncio.Queue[protos.TrainReply] = asyncio.Queue()

    async def Train(self, request_iterator: Any, context: Any) -> AsyncIterator[protos.TrainReply]:
        async def read() -> None:
            async for request in request_iterator:
                self.batches.append(request.batch.step)
                self.received.append(request.batch)

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            while True:
                yield await self.replies.get()

    async def SyncRollouts(self, request: protos.SyncRolloutsRequest, context: Any) -> protos.SyncRolloutsReply:
        self.syncs.append([server.name for server in request.servers if server.needs_version])
        return protos.SyncRolloutsReply(push=protos.PushReport(policy_version=self.version))

    def trained(self, step: int) -> None:
        self.version = step
        self.replies.put_nowait(protos.TrainReply(report=protos.StepReport(step=step)))

    def pushed(self, step: int) -> None:
        self.replies.put_nowait(protos.TrainReply(push=protos.PushReport(policy_version=step)))


class Scene:
    """A `Training` with one rollout server, on a book with one recorded step of one group."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self.book = Book(group_size=2, use_reference=False, max_attempts=2, journal=ledger)
        self.server = member("rollout-0", "rollout", "127.0.0.1:1")
        self.server.card = "awake"
        self.sharing = Sharing(
            self.book,
            on=True,
            members=lambda: [self.server],
            post=self.post,
            tell=lambda kind, service, message, **facts: None,
            on_problem=lambda member, problem: None,
        )
        self.training = Training(
            self.book,
            ledger,
            config.rules(),
            sharing=self.sharing,
            push_seconds=5.0,
            crew_size=None,
            members=lambda: [self.server],
            incarnation=lambda: 1,
            post=self.post,
            on_report=lambda report, batch: None,
            on_stop=lambda report: None,
            on_push=lambda push: self.book.push(push.policy_version),
            on_checkpoint=lambda report: None,
            on_end=lambda name, reason: None,
        )

    def post(self, message: Callable[[], None]) -> None:
        message()

    def generate(self) -> None:
        group = self.book.accept(protos.Prompt(text="1+1="))
        for sample in group.samples:
            self.book.lease(sample, lease_id=1, server="rollout-0", deadline=9.0)
            self.book.generate(sample, made_trajectory(sample.key))
            self.book.score(sample, value=1.0, breakdown={}, route="r")


def member(name: str, role: str, address: str) -> Member:
    return Member(name, role, address, f"process-{name}", protos.Identity(name=name, role=role), 0.0)


@pytest.fixture
async def scene(make_config: MakeConfig, tmp_path: Path) -> AsyncIterator[Scene]:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    made = Scene(make_config(run={"max_staleness": 0, "prompts_per_step": 1}), ledger)
    yield made
    await made.training.close()
    ledger.close()


@asynccontextmanager
async def joined(scene: Scene) -> AsyncIterator[Trainer]:
    trainer = Trainer()  # type: ignore[abstract]  # what it does not answer is UNIMPLEMENTED
    async with serving(lambda server: protos.add_TrainerServicer_to_server(trainer, server)) as address:
        await scene.training.connect(member("trainer", "trainer", address))
        await until(lambda: scene.training.ready)
        yield trainer
        await scene.training.close()


async def test_a_batch_waits_for_sleep_and_new_servers_wait_for_its_push(scene: Scene) -> None:
    async with joined(scene) as trainer:
        scene.generate()
        await scene.training.pump()
        await asyncio.sleep(SILENT_SECONDS)
        assert scene.book.recorded_step == 1 and trainer.batches == []
        scene.server.card = "asleep"
        await scene.training.pump()
        await until(lambda: trainer.batches == [1])
        scene.training.want_sync()
        trainer.trained(1)
        await until(lambda: not scene.book.batches)
        await scene.training.pump()
        await asyncio.sleep(SILENT_SECONDS)
        assert len(trainer.syncs) == 1, "only that of the join"
        trainer.pushed(1)
        await until(lambda: len(trainer.syncs) == 2)
        assert scene.book.pushed_version == 1


async def test_a_push_whose_report_was_lost_is_asked_for(scene: Scene) -> None:
    """The trainer ends its step and its push between two streams: the new one begins with the report alone."""
    async with joined(scene) as trainer:
        scene.generate()
        scene.server.card = "asleep"
        await scene.training.pump()
        await until(lambda: trainer.batches == [1])
    async with joined(scene) as same:
        same.trained(1)
        await until(lambda: not scene.book.batches)
        assert scene.sharing.trains and len(same.syncs) == 1
        await scene.training.pump()
        await until(lambda: not scene.sharing.trains)
        assert len(same.syncs) == 2 and same.batches == []


async def test_a_server_that_missed_the_push_of_a_dead_trainer_gets_its_version(scene: Scene) -> None:
    scene.server.has_version, scene.server.policy_version = True, 1
    scene.book.pushed_version = scene.book.recorded_step = scene.book.trained_step = 1
    trainer = Trainer()  # type: ignore[abstract]
    async with serving(lambda server: protos.add_TrainerServicer_to_server(trainer, server)) as address:
        for version, needy in ((1, []), (2, ["rollout-0"])):
            newcomer = member("trainer", "trainer", address)
            newcomer.policy_version = version
            await scene.training.connect(newcomer)
            await until(lambda: scene.training.ready)
            assert trainer.syncs[-1] == needy
        await scene.training.close()


async def test_who_shares_a_card_loads_when_nobody_else_does(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(launch={"share_gpu": True})
    async with attendance() as (conductor, desk):
        service = RolloutService(bind("rollout-0"), conductor=conductor, config=config, folder=tmp_path)
        async with alone_on_card(tmp_path, shared=True):
            task = asyncio.create_task(service.run())
            await asyncio.sleep(SILENT_SECONDS)
            assert service.address and not desk.joined
        await until(lambda: bool(desk.joined))
        service.drain()
        await task
    async with attendance() as (conductor, _), alone_on_card(tmp_path, shared=True):
        apart = RolloutService(bind("rollout-1"), conductor=conductor, config=make_config(), folder=tmp_path)
        async with running(apart):
            assert apart.address
