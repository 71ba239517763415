"""The greedy sample of each group over the wire: leased, generated, scored, sent to the trainer, and never alone."""

from collections.abc import AsyncIterator, Callable, Iterator
from math import nan
from pathlib import Path

import pytest

import protos
from protos.arrays import from_array
from services.config import Config
from services.records.book import State
from services.stages.generation import greedy
from tests.integration import kit
from tests.integration.kit import SAMPLING, serving, until
from tests.integration.test_filtering import RUN, Scene
from tests.integration.test_leases import Leasing, new_engine
from tests.integration.test_rollout_service import rollout_talk
from tests.integration.test_turns import Trainer, member
from tests.unit.services.life import made_trajectory

MakeConfig = Callable[..., Config]
REMAX = {"trainer": {"algorithm": {"adv_estimator": "remax"}}}
WORSE, BETTER, EQUAL = (0.0, 1.0, 0.25), (1.0, 0.0, 0.75), (0.5, 0.5, 0.0)


# Leases.


async def test_a_group_and_its_baseline_are_leased_together_and_the_baseline_is_greedy() -> None:
    stage, engine = Leasing(with_baseline=True), new_engine()
    async with serving(engine.add) as address:
        await stage.link("rollout-0", address)
        stage.generation.pump()
        await until(lambda: len(engine.leases) == 4)
        told = [(one.group, list(one.indices), one.baseline, one.sampling.temperature) for one in engine.leases]
        assert told == [(0, [0, 1], False, 1.0), (0, [2], True, 0.0), (1, [0, 1], False, 1.0), (1, [2], True, 0.0)]
        assert {one.sampling.max_tokens for one in engine.leases} == {5}
        assert stage.generation.in_hand("rollout-0") == 6 and stage.generation.links["rollout-0"].credit == 2
        for one in engine.leases:
            engine.deliver(one)
        await until(lambda: len(list(stage.book.samples(State.GENERATED))) == 6)
        assert [sample.key for sample in stage.book.samples(State.GENERATED) if sample.baseline] == [(0, 2), (1, 2)]
        await stage.generation.close()


@pytest.mark.parametrize("index", [1, 2])
async def test_a_sample_that_was_not_drawn_as_leased_is_drawn_again(index: int) -> None:
    stage, engine = Leasing(groups=1, with_baseline=True), new_engine()
    async with serving(engine.add) as address:
        await stage.link("rollout-0", address)
        stage.generation.pump()
        await until(lambda: len(engine.leases) == 2)
        trajectories = [
            made_trajectory((0, one), lease_id=lease.lease_id, baseline=lease.baseline != (one == index))
            for lease in engine.leases
            for one in lease.indices
        ]
        engine.outbox.put_nowait(protos.GenerateReply(trajectories=trajectories, credit=protos.Credit(samples=3)))
        await until(lambda: stage.book.refused["baseline_not_as_leased"] == 1)
        stage.generation.pump()
        await until(lambda: len(engine.leases) == 3)
        again = engine.leases[2]
        assert (list(again.indices), again.baseline, list(again.attempts)) == ([index], index == 2, [2])
        await stage.generation.close()


async def test_a_rollout_server_marks_what_it_draws_greedily(make_config: MakeConfig, tmp_path: Path) -> None:
    baseline = kit.lease(0, count=3, lease_id=2, sampling=greedy(SAMPLING))
    baseline.baseline = True
    async with rollout_talk(make_config(), tmp_path) as (_, talk, _):
        await talk.say(protos.GenerateRequest(leases=[kit.lease(0, count=8, lease_id=1), baseline]))
        trajectories = await talk.hear("trajectories", 11)
    drawn, marked = ([one for one in trajectories if one.lease_id == number] for number in (1, 2))
    assert [one.baseline for one in [*drawn, *marked]] == [False] * 8 + [True] * 3
    tokens = [{tuple(from_array(one.response_ids).tolist()) for one in part} for part in (drawn, marked)]
    assert len(tokens[0]) > 1 and len(tokens[1]) == 1, "only greedy samples are all the same"
    logprobs = [from_array(one.behaviour_logprobs) for one in marked]
    assert all((one <= 0).all() and (one > -20).all() for one in logprobs)


# Batches.


@pytest.fixture
def make_scene(make_config: MakeConfig, model_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(**run: int) -> Scene:
        trainer = REMAX["trainer"] | {"model": str(model_folder)}
        config = make_config(run={**RUN, "dynamic_sampling": 0, **run}, trainer=trainer)
        made.append(Scene(config, tmp_path / "ledger.sqlite"))
        return made[-1]

    yield make
    for scene in made:
        scene.ledger.close()


@pytest.fixture
async def trainer() -> AsyncIterator[tuple[Trainer, str]]:
    one = Trainer()  # type: ignore[abstract]  # what it does not answer is UNIMPLEMENTED
    async with serving(lambda server: protos.add_TrainerServicer_to_server(one, server)) as address:
        yield one, address


async def feed(scene: Scene, address: str) -> None:
    await scene.training.connect(member("trainer", "trainer", address))
    await until(lambda: scene.training.ready)


def told(batch: protos.TrajectoryBatch) -> list[tuple[int, int, float, bool]]:
    return [(one.key.group, one.key.index, one.reward, one.baseline) for one in batch.trajectories]


async def test_the_trainer_gets_each_group_with_its_marked_baseline_also_after_a_crash(
    make_scene: Callable[..., Scene], trainer: tuple[Trainer, str]
) -> None:
    (one, address), scene = trainer, make_scene()
    await feed(scene, address)
    await scene.complete(WORSE, BETTER)
    await until(lambda: one.batches == [1])
    expected = [
        *((0, 0, 0.0, False), (0, 1, 1.0, False), (0, 2, 0.25, True)),
        *((1, 0, 1.0, False), (1, 1, 0.0, False), (1, 2, 0.75, True)),
    ]
    assert told(one.received[0]) == expected
    await scene.training.close()
    scene.ledger.close()
    again = make_scene()
    assert again.book.counts().balanced and again.book.outstanding == 6
    await feed(again, address)
    await again.training.pump()
    await until(lambda: one.batches == [1, 1])
    assert one.received[1].replay and told(one.received[1]) == expected
    await again.training.close()


async def test_a_group_without_its_baseline_is_dropped_as_invalid(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    await scene.complete((0.0, 1.0, nan), WORSE)
    assert dict(scene.book.counts().dropped) == {"invalid": 2} and scene.book.quarantined == 1
    await scene.complete(BETTER)
    assert scene.positions() == [1, 2] and scene.book.counts().balanced


async def test_a_baseline_without_a_sample_to_train_on_is_dropped_as_invalid(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(dynamic_sampling=1)
    await scene.complete((nan, nan, 0.5), WORSE)
    assert (dict(scene.book.dropped), scene.book.quarantined) == ({"invalid": 1}, 2)
    await scene.complete((nan, 1.0, 0.5))
    assert scene.book.batches[1].keys == [(1, 0), (1, 1), (1, 2), (2, 1), (2, 2)], "one sample is enough"


async def test_a_baseline_that_grew_too_old_takes_its_group_with_it(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    for group in scene.accept():
        scene.deliver(group, WORSE)
        group.samples[2].oldest_version = -group.position  # of the second group: one version too old
    await scene.training.pump()
    assert scene.book.recorded_step == 0 and dict(scene.book.dropped) == {"stale": 3}


async def test_dynamic_sampling_looks_at_the_drawn_samples_only(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(dynamic_sampling=2)
    await scene.complete(EQUAL, WORSE)
    assert scene.filtered == 3, "the baseline goes with its group"
    await scene.complete(BETTER)
    assert scene.positions() == [1, 2]
