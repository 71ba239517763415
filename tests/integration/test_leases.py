"""Leases over real streams: a group stays together, a lost or late server costs an attempt and never a sample."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

import protos
import services.stages.link
from services.records.book import Book, Sample, State
from services.roster import Roster
from services.stages.generation import Generation, within_budget
from services.stages.link import Link
from services.stages.routing import Routing
from tests.integration.kit import member, serving, until
from tests.unit.services.life import Silence, made_trajectory


class Engine(protos.RolloutServicer):
    """Grants credit, collects leases and says what it is told to say."""

    def __init__(self) -> None:
        self.leases: list[protos.GroupLease] = []
        self.cancels: list[tuple[int, int]] = []
        self.outbox: asyncio.Queue[protos.GenerateReply] = asyncio.Queue()

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[protos.GenerateReply]:
        self.outbox = asyncio.Queue()
        yield protos.GenerateReply(credit=protos.Credit(samples=8))
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                yield await self.outbox.get()
        finally:
            reader.cancel()

    async def _read(self, request_iterator: Any) -> None:
        async for request in request_iterator:
            self.leases.extend(request.leases)
            self.cancels.extend((key.group, key.index) for key in request.cancels)

    def deliver(self, lease: protos.GroupLease, *, lease_id: int = 0) -> None:
        trajectories = [
            made_trajectory((lease.group, index), lease_id=lease_id or lease.lease_id, baseline=lease.baseline)
            for index in lease.indices
        ]
        self.outbox.put_nowait(
            protos.GenerateReply(trajectories=trajectories, credit=protos.Credit(samples=len(trajectories)))
        )

    def add(self, server: grpc.aio.Server) -> None:
        protos.add_RolloutServicer_to_server(self, server)


def new_engine() -> Engine:
    return Engine()  # type: ignore[abstract]  # what it does not answer is UNIMPLEMENTED


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Leasing:
    """A generation stage that may accept `groups` prompts."""

    def __init__(
        self, *, groups: int = 2, max_attempts: int = 4, budget: str = "9", with_baseline: bool = False
    ) -> None:
        self.book = Book(
            group_size=2,
            with_baseline=with_baseline,
            use_reference=False,
            max_attempts=max_attempts,
            journal=Silence(),
        )
        self.clock = Clock()
        self.quarantined: list[str] = []
        self.roster = Roster(heartbeat_seconds=1.0)
        run = SimpleNamespace(num_steps=1, prompts_per_step=groups, group_size=2, max_staleness=0)
        self.generation = Generation(
            self.book,
            sampling=protos.SamplingParams(temperature=1.0, max_tokens=5),
            run_seed=1,
            life=1,
            lease_seconds=10.0,
            next_prompt=lambda position: protos.Prompt(prompt_id=f"p{position}", extra={"max_tokens": budget}),
            routing=Routing(self.roster, self.book, run, max_version_skew=1),
            clock=self.clock,
            post=lambda message: message(),
            on_generated=lambda samples: None,
            on_end=lambda name, reason: None,
            on_quarantine=self._quarantine,
        )

    def _quarantine(self, sample: Sample, reason: str) -> None:
        self.quarantined.append(reason)
        self.book.quarantine(sample, reason)

    async def link(self, name: str, address: str, *, version: int | None = 0) -> None:
        """A server that has joined; `version` None: it has none yet."""
        joined = member(name, address)
        joined.role, joined.has_version, joined.policy_version = "rollout", version is not None, version or 0
        self.roster.members[name] = joined
        await self.generation.connect(joined)
        await until(lambda: self.generation.links[name].credit == 8)


async def test_a_group_stays_on_one_server_and_has_seeds_of_its_own() -> None:
    stage, engine = Leasing(), new_engine()
    async with serving(engine.add) as address:
        await stage.link("rollout-0", address)
        stage.generation.pump()
        await until(lambda: len(engine.leases) == 2)
        assert [list(lease.indices) for lease in engine.leases] == [[0, 1], [0, 1]]
        assert len({seed for lease in engine.leases for seed in lease.seeds}) == 4
        assert len({lease.lease_id for lease in engine.leases}) == 2
        assert stage.generation.in_hand("rollout-0") == 4
        for lease in engine.leases:
            engine.deliver(lease)
        await until(lambda: len(list(stage.book.samples(State.GENERATED))) == 4)
        assert stage.generation.in_hand("rollout-0") == 0 and stage.generation.links["rollout-0"].credit == 8
        await stage.generation.close()


@pytest.mark.parametrize(("budget", "max_tokens"), [("3", 3), ("5", 5), ("9", 5)])
async def test_a_prompt_may_ask_for_less_than_the_run_allows_and_never_for_more(budget: str, max_tokens: int) -> None:
    stage, engine = Leasing(groups=1, budget=budget), new_engine()
    async with serving(engine.add) as address:
        await stage.link("rollout-0", address)
        stage.generation.pump()
        await until(lambda: len(engine.leases) == 1)
        assert engine.leases[0].sampling.max_tokens == max_tokens
        await stage.generation.close()


def test_a_prompt_without_a_budget_is_drawn_as_the_run_says() -> None:
    run = protos.SamplingParams(temperature=0.7, max_tokens=100, ignore_eos=True)
    own = within_budget(run, protos.Prompt(extra={"max_tokens": "30"}))
    assert (own.max_tokens, own.ignore_eos, run.max_tokens) == (30, True, 100) and own.temperature == run.temperature
    assert within_budget(run, protos.Prompt(extra={"other": "1"})) == run


async def test_a_server_without_the_newest_version_gets_no_lease() -> None:
    stage, engine = Leasing(), new_engine()
    async with serving(engine.add) as address:
        await stage.link("rollout-0", address, version=None)
        stage.generation.pump()
        assert stage.book.accepted == 0 and stage.generation.in_hand("rollout-0") == 0
        await stage.generation.close()


async def test_the_leases_of_a_dead_server_go_to_another_with_the_same_seeds() -> None:
    stage, dying, living = Leasing(groups=1), new_engine(), new_engine()
    async with serving(living.add) as second:
        async with serving(dying.add) as first:
            await stage.link("rollout-0", first)
            stage.generation.pump()
            await until(lambda: len(dying.leases) == 1)
        await until(lambda: len(stage.book.pending) == 2)
        await stage.link("rollout-1", second)
        stage.generation.pump()
        await until(lambda: len(living.leases) == 1)
        (lost,), (again,) = dying.leases, living.leases
        assert (lost.seeds, lost.indices) == (again.seeds, again.indices)
        assert (list(lost.attempts), list(again.attempts)) == ([1, 1], [2, 2])
        living.deliver(again, lease_id=lost.lease_id)
        await until(lambda: stage.book.refused["late"] == 2)
        living.deliver(again)
        await until(lambda: len(list(stage.book.samples(State.GENERATED))) == 2)
        living.deliver(again)
        await until(lambda: stage.book.refused["duplicate"] == 2)
        assert stage.book.counts().balanced
        await stage.generation.close()


async def test_a_lease_that_expires_is_cancelled_and_given_again() -> None:
    stage, engine = Leasing(groups=1, max_attempts=2), new_engine()
    async with serving(engine.add) as address:
        await stage.link("rollout-0", address)
        for expected in (1, 2):
            stage.generation.pump()
            await until(lambda expected=expected: len(engine.leases) == expected)  # type: ignore[misc]
            stage.clock.now += 9.0
            stage.generation.expire()
            assert stage.generation.in_hand("rollout-0") == 2
            stage.clock.now += 2.0
            stage.generation.expire()
            await until(lambda expected=expected: len(engine.cancels) == 2 * expected)  # type: ignore[misc]
            assert stage.generation.in_hand("rollout-0") == 0
        assert stage.quarantined == ["lease_expired"] * 2, "max_attempts leases, then it is put aside"
        assert stage.book.counts().balanced and stage.book.groups == {}
        await stage.generation.close()


async def test_a_permanent_nack_puts_aside_and_another_gives_back() -> None:
    stage, engine = Leasing(groups=1), new_engine()
    async with serving(engine.add) as address:
        await stage.link("rollout-0", address)
        stage.generation.pump()
        await until(lambda: len(engine.leases) == 1)
        lease_id = engine.leases[0].lease_id
        nacks = [
            protos.Nack(
                key=protos.SampleKey(group=0, index=0), lease_id=lease_id, reason="unfit_prompt", permanent=True
            ),
            protos.Nack(key=protos.SampleKey(group=0, index=1), lease_id=lease_id, reason="draining"),
        ]
        engine.outbox.put_nowait(protos.GenerateReply(nacks=nacks))
        await until(lambda: bool(stage.book.pending))
        assert stage.quarantined == ["unfit_prompt: "]
        stage.generation.pump()
        assert len(stage.book.pending) == 1, "a server that leaves gets no more"
        await stage.generation.close()


# One stream.


async def test_a_peer_that_is_not_there_ends_the_link_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services.stages.link, "OPEN_SECONDS", 0.2)
    async with serving() as address:
        pass
    ended: list[str] = []
    link: Link[Any, Any] = Link(
        "rollout-0",
        address,
        open_stream=lambda channel: protos.RolloutStub(channel).Generate(),
        on_reply=lambda link, reply: None,
        on_end=lambda link, reason: ended.append(reason),
    )
    await until(lambda: bool(ended))
    assert ended == ["TimeoutError"]
    await link.close()


async def test_a_link_that_is_closed_tells_nobody() -> None:
    ended: list[str] = []
    engine = new_engine()
    async with serving(engine.add) as address:
        credit: list[int] = []
        link: Link[protos.GenerateRequest, protos.GenerateReply] = Link(
            "rollout-0",
            address,
            open_stream=lambda channel: protos.RolloutStub(channel).Generate(),
            on_reply=lambda link, reply: credit.append(reply.credit.samples),
            on_end=lambda link, reason: ended.append(reason),
        )
        await until(lambda: credit == [8])
        await link.close()
        await link.close()
    await asyncio.sleep(0.02)
    assert ended == []
