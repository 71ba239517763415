"""Evaluation beside training over real streams: marked leases within a share, verdicts, losses, what is given up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import protos
from services.config import Config
from services.records.book import State
from tests.integration.evaluation_kit import CREDIT, Scene, answer, evaluation_leases, playing, training_leases
from tests.integration.kit import until
from tests.integration.test_leases import new_engine

MakeConfig = Callable[..., Config]
EVERY_TWO = {"every_steps": 2, "num_prompts": 2, "share": 1.0}
TWICE = {**EVERY_TWO, "samples_per_prompt": 2, "temperature": 0.5, "k": [1, 2]}


@pytest.fixture
def make_scene(make_config: MakeConfig, tmp_path: Path) -> Callable[..., Scene]:
    def make(evaluation: dict[str, Any], **options: Any) -> Scene:
        return Scene(make_config(evaluation=evaluation), tmp_path, **options)

    return make


async def test_an_evaluation_is_leased_judged_and_told_and_the_book_knows_nothing_of_it(
    make_scene: Callable[..., Scene],
) -> None:
    scene, engine = make_scene(TWICE, groups=1), new_engine()
    async with playing(scene, engine) as reward:
        scene.push(1)
        scene.turn()
        assert not scene.evaluating.sheet.open, "version 1 is not due"
        scene.push(2)
        await scene.until(lambda: len(evaluation_leases(engine)) == 2)
        first, second = evaluation_leases(engine)
        assert [list(lease.indices) for lease in (first, second)] == [[0, 1], [0, 1]]
        assert {lease.sampling.temperature for lease in (first, second)} == {0.5}
        assert {lease.prompt.prompt_id.split("/")[1] for lease in (first, second)} == {"test"}
        seeds = [seed for lease in engine.leases for seed in lease.seeds]
        assert len(set(seeds)) == len(seeds) == 6, "training and evaluation draw apart"
        answer(engine, first, "right 1", "wrong 2")
        answer(engine, second, "wrong 1", "wrong 2", version=1, spans=2)
        await scene.until(lambda: not scene.evaluating.sheet.open)
        (row,) = scene.rows("evals")
        expected = {"number": 1, "version": 2, "pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.5, "mean_reward": 0.25}
        assert row | expected == row and row["failures"] == {} and reward.asked == 4
        assert (row["oldest_version"], row["newest_version"]) == (1, 2)
        assert scene.events("evaluation")[0]["pass@2"] == 0.5
        counts = scene.book.counts()
        assert (counts.accepted, counts.in_flight, scene.book.outstanding) == (2, 2, 2) and not counts.refused
        assert scene.generation.in_hand("rollout-0") == 2 and not scene.evaluating.in_hand


@pytest.mark.parametrize(("share", "expected"), [(0.25, 2), (0.5, 4), (0.01, 1), (1.0, 6)])
async def test_it_takes_its_share_and_leaves_room_for_a_group(
    make_scene: Callable[..., Scene], share: float, expected: int
) -> None:
    scene, engine = make_scene({**EVERY_TWO, "num_prompts": 20, "share": share}, groups=1), new_engine()
    async with playing(scene, engine):
        scene.push(2)
        await scene.until(lambda: bool(evaluation_leases(engine)))
        scene.turn()
        assert not engine.leases[0].evaluation, "training comes first"
        assert sum(len(lease.indices) for lease in evaluation_leases(engine)) == expected
        assert scene.generation.links["rollout-0"].credit == CREDIT - 2 - expected


async def test_training_goes_on_beside_an_evaluation_that_does_not_end(make_scene: Callable[..., Scene]) -> None:
    scene, engine = make_scene({**EVERY_TWO, "num_prompts": 20, "share": 1.0}, groups=1), new_engine()
    async with playing(scene, engine):
        scene.push(2)
        await scene.until(lambda: len(evaluation_leases(engine)) == 6)
        for _ in range(5):
            engine.deliver(training_leases(engine)[-1])
            await scene.until(lambda: len(list(scene.book.samples(State.GENERATED))) == 2)
            for sample in list(scene.book.samples(State.GENERATED)):
                scene.book.quarantine(sample, "so that the next one may begin")
            await scene.until(lambda: any(lease.group in scene.book.groups for lease in training_leases(engine)))
        assert scene.book.quarantined == 10
        assert len(evaluation_leases(engine)) == 6 and scene.evaluating.in_hand


async def test_when_all_is_trained_it_takes_all(make_scene: Callable[..., Scene]) -> None:
    scene, engine = make_scene({**EVERY_TWO, "num_prompts": 20, "share": 0.25}), new_engine()
    async with playing(scene, engine):
        scene.push(2)
        await scene.until(lambda: len(engine.leases) == CREDIT)
        assert not scene.evaluating.over()


async def test_what_a_lost_server_had_goes_to_another_and_a_sample_too_often_lost_is_counted(
    make_scene: Callable[..., Scene],
) -> None:
    scene, first, second = make_scene(EVERY_TWO), new_engine(), new_engine()
    async with playing(scene, first, second):
        scene.push(2)
        await scene.until(lambda: len(first.leases) == len(second.leases) == 1)
        lost = first.leases[0]
        await scene.generation.drop("rollout-0", "gone")
        scene.roster.lose("rollout-0", "gone")
        await scene.until(lambda: len(second.leases) == 2)
        again = second.leases[1]
        assert (again.group, list(again.attempts)) == (lost.group, [2])
        nack = protos.Nack(
            key=protos.SampleKey(group=again.group, index=0, evaluation=1), lease_id=again.lease_id, reason="draining"
        )
        second.outbox.put_nowait(protos.GenerateReply(nacks=[nack]))
        answer(second, second.leases[0], "right")
        await scene.until(lambda: not scene.evaluating.sheet.open)
        (row,) = scene.rows("evals")
        assert row["failures"] == {"draining": 1} and row["pass@1"] == 1.0 and row["num_prompts"] == 2


async def test_an_expired_lease_is_cancelled_and_granted_again(make_scene: Callable[..., Scene]) -> None:
    scene, engine = make_scene({**EVERY_TWO, "num_prompts": 1}), new_engine()
    async with playing(scene, engine):
        scene.push(2)
        await scene.until(lambda: len(engine.leases) == 1)
        scene.clock.now = 200.0
        scene.generation.expire()
        await scene.until(lambda: len(engine.leases) == 2 and engine.cancels == [(0, 0)])
        answer(engine, engine.leases[0], "wrong")  # too late
        answer(engine, engine.leases[1], "right")
        await scene.until(lambda: not scene.evaluating.sheet.open)
        assert scene.rows("evals")[0]["pass@1"] == 1.0
        assert scene.evaluating.sheet.refused == {"lease_expired": 1, "late": 1}


async def test_a_reward_that_fails_twice_gives_no_verdict(make_scene: Callable[..., Scene]) -> None:
    scene, engine = make_scene(EVERY_TWO), new_engine()
    async with playing(scene, engine) as reward:
        scene.push(2)
        await scene.until(lambda: len(engine.leases) == 2)
        answer(engine, engine.leases[0], "right")
        answer(engine, engine.leases[1], "broken")
        await scene.until(lambda: not scene.evaluating.sheet.open)
        (row,) = scene.rows("evals")
        assert row["failures"] == {"reward_crash": 1} and row["pass@1"] == 1.0 and row["mean_reward"] == 1.0
        assert reward.asked == 3


async def test_what_is_not_over_when_the_next_is_due_is_dropped_and_counted(make_scene: Callable[..., Scene]) -> None:
    scene, engine = make_scene({**EVERY_TWO, "num_prompts": 1}), new_engine()
    async with playing(scene, engine):
        scene.push(2)
        await scene.until(lambda: len(engine.leases) == 1)
        scene.push(5)  # 4 was skipped: 5 stands in for it
        await scene.until(lambda: len(engine.leases) == 2 and engine.cancels == [(0, 0)])
        assert [lease.evaluation for lease in engine.leases] == [1, 2]
        answer(engine, engine.leases[0], "wrong")
        answer(engine, engine.leases[1], "right", version=5)
        await scene.until(lambda: not scene.evaluating.sheet.open)
        assert [(row["number"], row["version"], row["pass@1"]) for row in scene.rows("evals")] == [(2, 5, 1.0)]
        assert scene.events("evaluation_dropped")[0]["why"] == "the next one is due"
        summary = scene.evaluating.occasions.summary()
        assert summary is not None and summary["dropped"] == 1 and summary["last"]["version"] == 5


async def test_what_is_complete_when_the_next_is_due_counts(make_scene: Callable[..., Scene]) -> None:
    scene, engine = make_scene({**EVERY_TWO, "num_prompts": 1}), new_engine()
    async with playing(scene, engine):
        scene.push(2)
        await scene.until(lambda: len(engine.leases) == 1)
        answer(engine, engine.leases[0], "right")
        await until(lambda: bool(scene.evaluating.judging.waiting))
        scene.evaluating.judging.pump()
        await until(lambda: not scene.evaluating.sheet.unsettled)
        scene.push(4)
        scene.turn()
        assert [row["version"] for row in scene.rows("evals")] == [2] and scene.evaluating.sheet.version == 4
        assert scene.events("evaluation_dropped") == []


async def test_the_end_of_the_run_waits_until_the_deadline_and_no_longer(make_scene: Callable[..., Scene]) -> None:
    scene, engine = make_scene({**EVERY_TWO, "num_prompts": 1, "deadline_seconds": 30.0}), new_engine()
    async with playing(scene, engine):
        scene.push(3)
        await scene.until(lambda: len(engine.leases) == 1)
        assert not scene.evaluating.over()
        scene.clock.now = 29.0
        assert not scene.evaluating.over()
        scene.clock.now = 31.0
        assert scene.evaluating.over() and scene.evaluating.over()
        assert "30 s after the last step" in scene.events("evaluation_dropped")[0]["why"]
        summary = scene.evaluating.occasions.summary()
        assert summary == {"last": None, "best": None, "dropped": 1}


async def test_a_conductor_that_comes_back_begins_again_and_remembers_the_best(
    make_scene: Callable[..., Scene], make_config: MakeConfig, tmp_path: Path
) -> None:
    scene, engine = make_scene({**EVERY_TWO, "num_prompts": 1}), new_engine()
    async with playing(scene, engine):
        scene.push(2)
        await scene.until(lambda: len(engine.leases) == 1)
        answer(engine, engine.leases[0], "right")
        await scene.until(lambda: not scene.evaluating.sheet.open)
        scene.push(4)
        await scene.until(lambda: len(engine.leases) == 2)
    config, other = make_config(evaluation={**EVERY_TWO, "num_prompts": 1}), new_engine()
    later = Scene(config, tmp_path, facts=scene.facts)
    later.push(4)
    async with playing(later, other):
        await later.until(lambda: len(other.leases) == 1)
        assert other.leases[0].evaluation == 3, "another number: what the second one asked for is late"
        answer(other, other.leases[0], "wrong", version=4)
        await later.until(lambda: not later.evaluating.sheet.open)
        later.turn()
        assert not later.evaluating.sheet.open, "version 4 is done"
        summary = later.evaluating.occasions.summary()
        assert summary is not None and (summary["best"]["version"], summary["last"]["version"]) == (2, 4)
        shown = later.evaluating.occasions.shown()
        assert (shown["pass@1"], shown["best_pass@1"], shown["best_version"]) == (0.0, 1.0, 2.0)


def test_start_and_end_are_options(make_scene: Callable[..., Scene]) -> None:
    def versions(**options: bool) -> list[int]:
        occasions = make_scene({"every_steps": 2, **options}).evaluating.occasions
        occasions._num_steps = 5
        return [version for version in range(6) if occasions.due(version) and occasions.begin(version)]

    assert versions() == [2, 4, 5]
    assert versions(at_start=True) == [0, 2, 4, 5]
    assert versions(at_end=False) == [2, 4]


async def test_without_evaluation_nothing_is_asked_of_anybody(make_scene: Callable[..., Scene]) -> None:
    scene, engine = make_scene({}, groups=1), new_engine()
    async with playing(scene, engine) as reward:
        scene.push(2)
        await scene.until(lambda: len(engine.leases) == 1)
        assert not scene.evaluating.judging.station.links and reward.asked == 0 and scene.evaluating.over()
        assert scene.evaluating.occasions.summary() is None
        assert len(list(scene.book.samples(State.LEASED))) == 2


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"evaluation": {"every_steps": 1, "samples_per_prompt": 2}}, "draws one sample again and again"),
        ({"evaluation": {"every_steps": 1, "k": [2]}}, "k=2 is not between 1 and samples_per_prompt=1"),
        ({"evaluation": {"every_steps": 1}, "data": {"type": "random"}}, "say evaluation.data"),
        ({"evaluation": {"every_steps": 1}, "rollout": {"max_num_seqs": 1, "model": "m"}}, "group fills the 2 samples"),
    ],
)
def test_what_makes_no_sense_is_refused(make_config: MakeConfig, sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        make_config(**sections)
