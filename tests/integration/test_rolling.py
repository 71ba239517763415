"""Pushes that do not stop the fleet: crews of a few servers while the others decode; staging beside decoding."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import protos
from services.config import Config
from services.pushes.pushing import Pusher
from services.pushes.rolling import Rota, roll
from services.rollout import RolloutService
from tests.integration.kit import ENDLESS, attendance, bind, channel_to, lease, running, serving, talking, until
from tests.integration.test_push import addresses, holds, new_pusher, outgoing_of, servers
from trainer.pushes.weights import Receiving

MakeConfig = Callable[..., Config]


class Watch:
    """What three services do at the same time."""

    def __init__(self) -> None:
        self.services: list[RolloutService] = []
        self.in_push: set[str] = set()
        self.most_in_push = 0
        self.witnessed: list[tuple[str, int]] = []
        """(server in a push, servers that were seen to decode meanwhile)."""

    def tokens(self) -> dict[str, int]:
        return {service.name: service._num_tokens for service in self.services}

    async def others_decode(self, name: str, before: dict[str, int]) -> None:
        """Wait until every server but `name` has brought samples to their end since then."""
        others = set(before) - {name}
        await until(lambda: all(self.tokens()[other] > before[other] for other in others))
        self.witnessed.append((name, len(others)))


class WatchedService(RolloutService):
    """Says when a push begins, and does not end it before the others have been seen at work."""

    watch: Watch

    async def BeginPush(self, request: protos.BeginPushRequest, context: Any) -> protos.BeginPushReply:
        self.watch.in_push.add(self.name)
        self.watch.most_in_push = max(self.watch.most_in_push, len(self.watch.in_push))
        self._before = self.watch.tokens()
        return await super().BeginPush(request, context)

    async def CommitPush(self, request: protos.CommitPushRequest, context: Any) -> protos.CommitPushReply:
        await self.watch.others_decode(self.name, self._before)
        reply = await super().CommitPush(request, context)
        self.watch.in_push.remove(self.name)
        return reply


@asynccontextmanager
async def busy_fleet(make_config: MakeConfig, folder: Path, *, count: int = 3) -> AsyncIterator[Watch]:
    """Services that have always something to decode."""
    watch, config = Watch(), make_config()
    async with AsyncExitStack() as stack:
        conductor, _ = await stack.enter_async_context(attendance())
        for at in range(count):
            service = WatchedService(bind(f"rollout-{at}"), conductor=conductor, config=config, folder=folder)
            service.watch = watch
            watch.services.append(await stack.enter_async_context(running(service)))
        feeders = [asyncio.create_task(feed(service)) for service in watch.services]
        try:
            yield watch
        finally:
            for feeder in feeders:
                feeder.cancel()
            await asyncio.gather(*feeders, return_exceptions=True)


async def feed(service: RolloutService) -> None:
    """Two groups in hand at any time."""
    async with channel_to(service.address) as channel, talking(protos.RolloutStub(channel).Generate) as talk:
        group = 0
        while True:
            await talk.say(protos.GenerateRequest(leases=[lease(group, sampling=ENDLESS)]))
            group += 1
            await until(lambda: len(talk.heard("trajectories")) >= 2 * (group - 1))  # noqa: B023


async def rolled(pusher: Pusher, rota: Rota, version: int, **options: Any) -> list[protos.PushReport]:
    reports = roll(pusher, rota, version, names=pusher.lacking(version), transport="gloo", **options)
    return [report async for report in reports]


def groups_of(pusher: Pusher) -> set[str]:
    return {crew.rendezvous.group_id for crew in pusher.broadcaster._crews.values()}


async def test_in_a_rolling_push_two_of_three_servers_decode_at_every_instant(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    outgoing, rota = outgoing_of(model_folder), Rota(1)
    pusher = new_pusher(outgoing, tmp_path, deadline_seconds=30.0)
    async with busy_fleet(make_config, tmp_path) as watch:
        await pusher.set_members(addresses(watch.services))
        groups = []
        for version in (1, 2):
            reports = await rolled(pusher, rota, version)
            assert [list(report.committed) for report in reports] == [["rollout-0"], ["rollout-1"], ["rollout-2"]]
            assert [len(report.waiting) for report in reports] == [2, 1, 0]
            assert [await holds(service, outgoing, version) for service in watch.services] == [True] * 3
            groups.append(groups_of(pusher))
        assert watch.most_in_push == 1
        assert watch.witnessed == [(f"rollout-{at}", 2) for _ in range(2) for at in range(3)]
        assert len(groups[0]) == 3 and groups[0] == groups[1], "each crew keeps its group from push to push"
        await pusher.set_members([])


async def test_a_crew_with_a_dead_server_does_not_stop_the_next_one(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    outgoing, rota = outgoing_of(model_folder), Rota(2)
    pusher = new_pusher(outgoing, tmp_path)
    async with serving() as dead:
        pass
    async with servers(make_config, tmp_path, 3) as services:
        await pusher.set_members([protos.RolloutAddress(name="a", address=dead), *addresses(services)])
        first, second = await rolled(pusher, rota, 1)
        assert list(first.failed) == ["a"] and list(first.committed) == ["rollout-0"]
        assert sorted(second.committed) == ["rollout-1", "rollout-2"] and not second.failed
        assert [await holds(service, outgoing, 1) for service in services] == [True] * 3
        first, second = await rolled(pusher, rota, 2)
        assert list(first.committed) == ["rollout-0"] and len(second.committed) == 2
        await pusher.set_members([])


async def test_an_overtaken_push_leaves_servers_behind_no_further_than_the_skew_and_the_next_one_fetches_them(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    outgoing, rota, skew = outgoing_of(model_folder), Rota(1), 2
    pusher = new_pusher(outgoing, tmp_path)
    async with servers(make_config, tmp_path, 3) as services:
        await pusher.set_members(addresses(services))
        await rolled(pusher, rota, 1)
        seen: list[tuple[int, ...]] = []
        for version in (2, 3, 4, 5):
            await rolled(pusher, rota, version, superseded=within(version + 1, skew))
            seen.append(versions(services))
        assert seen == [(2, 1, 1), (2, 3, 3), (4, 3, 3), (4, 5, 5)]
        await rolled(pusher, rota, 6)
        assert versions(services) == (6, 6, 6), "nothing newer waits: it goes to all"
        assert [await holds(service, outgoing, 6) for service in services] == [True] * 3
        await pusher.set_members([])


def within(newest: int, skew: int) -> Callable[[int], bool]:
    return lambda oldest: newest - oldest <= skew


def versions(services: Sequence[RolloutService]) -> tuple[int, ...]:
    return tuple(service.engine.policy_version for service in services)


async def test_a_server_decodes_between_the_begin_and_the_commit_of_a_push_while_half_of_the_bytes_are_there(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    outgoing = outgoing_of(model_folder)
    pusher = new_pusher(outgoing, tmp_path)
    async with servers(make_config, tmp_path, 1) as (service,), channel_to(service.address) as channel:
        stub = protos.RolloutStub(channel)
        await pusher.set_members(addresses([service]))
        await pusher.push(1, transport="gloo")
        crew = pusher.broadcaster.crew("gloo", [Receiving(f"{service.name}@{service.address}")])
        begin = protos.BeginPushRequest(
            policy_version=2,
            incarnation=1,
            manifest=outgoing.manifest,
            transport=protos.TRANSPORT_GLOO,
            rendezvous=crew.place(f"{service.name}@{service.address}"),
            deadline_seconds=20.0,
        )
        async with talking(stub.Generate) as talk:
            await stub.BeginPush(begin, timeout=5.0)
            half = len(outgoing.buffers) // 2
            await asyncio.wrap_future(pusher.broadcaster.send(crew, outgoing.buffers[:half], deadline_seconds=20.0))
            await talk.say(protos.GenerateRequest(leases=[lease(0, count=4, sampling=ENDLESS)]))
            during = list(await talk.hear("trajectories", 4))
            rest = pusher.broadcaster.send(crew, outgoing.buffers[half:], deadline_seconds=20.0)
            commit = protos.CommitPushRequest(policy_version=2, incarnation=1, checksums=outgoing.checksums)
            await stub.CommitPush(commit, timeout=20.0)
            await asyncio.wrap_future(rest)
            await talk.say(protos.GenerateRequest(leases=[lease(1, count=4, sampling=ENDLESS)]))
            after = (await talk.hear("trajectories", 8))[4:]
        assert await holds(service, outgoing, 2)
        assert sum(span.num_tokens for trajectory in during for span in trajectory.spans) == 4 * ENDLESS.max_tokens
        assert {span.policy_version for trajectory in during for span in trajectory.spans} == {1}
        assert {span.policy_version for trajectory in after for span in trajectory.spans} == {2}
        await pusher.set_members([])
