"""A conductor's stages that evaluation has to do with, over real streams, and servers that say what they are told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

import protos
from services.config import Config
from services.evaluation.evaluating import Evaluating
from services.records.book import Book
from services.records.journalist import Journalist
from services.roster import Roster
from services.stages.generation import Generation
from services.stages.routing import Routing
from tests.integration.kit import member, serving, until
from tests.integration.test_leases import Clock, Engine
from tests.unit.services.life import Silence, made_trajectory

CREDIT = 8
"""Samples that an engine takes at once."""


class Reward(protos.RewardServicer):
    """Gives a reward for every response, by its text; unknown texts fail."""

    def __init__(self) -> None:
        self.values = {"right": 1.0, "wrong": 0.0}
        self.asked = 0

    async def Score(self, request_iterator: Any, context: Any) -> AsyncIterator[protos.ScoreReply]:
        yield protos.ScoreReply(credit=protos.Credit(samples=100))
        async for request in request_iterator:
            self.asked += len(request.items)
            yield protos.ScoreReply(results=[self.result(item) for item in request.items])

    def result(self, item: protos.ScoreItem) -> protos.ScoreResult:
        word = item.response.split()[0]
        result = protos.ScoreResult(key=item.key, ticket=item.ticket, route="r@1", answer=word)
        if word in self.values:
            result.value = self.values[word]
        else:
            result.failure, result.message = protos.SCORE_FAILURE_CRASH, "not this one"
        return result

    def add(self, server: grpc.aio.Server) -> None:
        protos.add_RewardServicer_to_server(self, server)


class Facts:
    """What a ledger remembers."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def fact(self, name: str, default: str = "") -> str:
        return self.held.get(name, default)

    def set_fact(self, name: str, value: str) -> None:
        self.held[name] = value


class Scene:
    """The stages of a conductor that evaluation has to do with, and servers that say what they are told to."""

    def __init__(self, config: Config, folder: Path, *, groups: int = 0, facts: Facts | None = None) -> None:
        """`groups`: prompts that training may begin."""
        self.book = Book(group_size=2, use_reference=False, max_attempts=2, journal=Silence())
        self.roster, self.clock, self.facts = Roster(heartbeat_seconds=1.0), Clock(), facts or Facts()
        self.run = SimpleNamespace(num_steps=4 if groups else 0, prompts_per_step=groups, max_staleness=0)
        self.journalist = Journalist(folder, self.book, config)
        self.folder = folder
        self.routing = Routing(self.roster, self.book, self.run, max_version_skew=1)
        self.evaluating = Evaluating(
            config,
            self.book,
            self.facts,
            self.journalist,
            self.routing,
            clock=self.clock,
            post=lambda message: message(),
            on_end=lambda name, reason: None,
        )
        self.generation = Generation(
            self.book,
            sampling=protos.SamplingParams(max_tokens=5, temperature=1.0),
            run_seed=1,
            life=1,
            lease_seconds=10.0,
            next_prompt=lambda position: protos.Prompt(prompt_id=f"p{position}"),
            routing=self.routing,
            clock=self.clock,
            post=lambda message: message(),
            on_generated=lambda samples: None,
            on_end=lambda name, reason: None,
            on_quarantine=self.book.quarantine,
            aside=self.evaluating,
        )

    async def join(self, name: str, address: str) -> None:
        """A rollout server with the version that all have."""
        joined = member(name, address)
        joined.role, joined.has_version, joined.policy_version = "rollout", True, self.book.pushed_version
        self.roster.members[name] = joined
        await self.generation.connect(joined)
        await until(lambda: self.generation.links[name].credit == CREDIT)

    def push(self, version: int) -> None:
        for one in self.roster.of("rollout"):
            one.policy_version = version
        self.book.recorded_step = version
        self.book.push(version)

    def turn(self) -> None:
        """One turn of the conductor's loop."""
        self.evaluating.pump()
        self.generation.pump()

    async def until(self, condition: Callable[[], bool]) -> None:
        def turned() -> bool:
            self.turn()
            return condition()

        await until(turned)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / f"{name}.jsonl").read_text().splitlines()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows("events") if row["kind"] == kind]

    async def close(self) -> None:
        await self.generation.close()
        await self.evaluating.close()
        self.journalist.close()


@asynccontextmanager
async def playing(scene: Scene, *engines: Engine) -> AsyncIterator[Reward]:
    """All servers up and joined: rollout-0, rollout-1, ... and one reward service."""
    reward = Reward()  # type: ignore[abstract]  # what it does not answer is UNIMPLEMENTED
    async with serving(reward.add) as judge:
        joined = member("reward-0", judge)
        joined.role = "reward"
        await scene.evaluating.rewire(joined, joined=True)
        async with running(scene, engines):
            try:
                yield reward
            finally:
                await scene.close()


@asynccontextmanager
async def running(scene: Scene, engines: tuple[Engine, ...], *, number: int = 0) -> AsyncIterator[None]:
    if number == len(engines):
        yield
        return
    async with serving(engines[number].add) as address:
        await scene.join(f"rollout-{number}", address)
        async with running(scene, engines, number=number + 1):
            yield


def evaluation_leases(engine: Engine) -> list[protos.GroupLease]:
    return [lease for lease in engine.leases if lease.evaluation]


def training_leases(engine: Engine) -> list[protos.GroupLease]:
    return [lease for lease in engine.leases if not lease.evaluation]


def answer(engine: Engine, lease: protos.GroupLease, *texts: str, version: int = 2, spans: int = 1) -> None:
    """The samples of a lease come back with these texts."""
    made = []
    for index, text in zip(lease.indices, texts, strict=True):
        trajectory = made_trajectory((lease.group, index), lease_id=lease.lease_id, version=version, spans=spans)
        trajectory.key.evaluation, trajectory.response_text = lease.evaluation, text
        made.append(trajectory)
    engine.outbox.put_nowait(protos.GenerateReply(trajectories=made, credit=protos.Credit(samples=len(made))))
