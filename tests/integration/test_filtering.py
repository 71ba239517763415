"""Dynamic sampling: which groups are dropped, what takes their place, and when a step trains on them all the same."""

from collections.abc import AsyncIterator, Callable, Iterator
from math import isnan
from pathlib import Path

import pytest
from pydantic import ValidationError

import protos
from services.config import Config
from services.records.book import Book, Group
from services.records.ledger import Ledger
from services.records.recovery import recover
from services.roster import Member, Roster
from services.stages.routing import Routing
from services.stages.sharing import Sharing
from services.stages.training import Training
from tests.integration.kit import serving, until
from tests.integration.test_turns import Trainer, member
from tests.unit.services.life import made_trajectory

MakeConfig = Callable[..., Config]
RUN = {"num_steps": 3, "prompts_per_step": 2, "group_size": 2, "max_staleness": 0, "dynamic_sampling": 2}
EQUAL, DIFFERENT = (1.0, 1.0), (0.0, 1.0)


class Scene:
    """A book with admission as in a run, and a `Training` that drops and batches; rewards come by hand."""

    def __init__(self, config: Config, path: Path) -> None:
        self.ledger = Ledger(path)
        self.book = Book(
            group_size=2,
            with_baseline=config.trainer.algorithm.with_baseline,
            use_reference=False,
            max_attempts=2,
            journal=self.ledger,
        )
        recover(self.book, self.ledger)
        roster = Roster(heartbeat_seconds=1.0)
        server = Member("rollout-0", "rollout", "h:1", "p", protos.Identity(), 0.0)
        server.has_version, server.policy_version = True, self.book.pushed_version
        self.server = roster.members["rollout-0"] = server
        self.routing = Routing(roster, self.book, config.run, max_version_skew=1)
        self.batches: list[list[tuple[int, int]]] = []
        self.training = self.make_training(config)

    def make_training(self, config: Config) -> Training:
        def post(message: Callable[[], None]) -> None:
            message()

        return Training(
            self.book,
            self.ledger,
            config.rules(),
            sharing=Sharing(
                self.book,
                on=False,
                members=lambda: [],
                post=post,
                tell=lambda kind, service, message, **facts: None,
                on_problem=lambda member, problem: None,
            ),
            push_seconds=5.0,
            crew_size=None,
            members=lambda: [],
            incarnation=lambda: 1,
            post=post,
            on_report=lambda report, batch: self.batches.append(batch.keys),
            on_stop=lambda report: None,
            on_push=self.pushed,
            on_checkpoint=lambda report: None,
            on_end=lambda name, reason: None,
        )

    def pushed(self, push: protos.PushReport) -> None:
        self.server.policy_version = push.policy_version
        self.book.push(push.policy_version)

    def accept(self) -> list[Group]:
        """All the groups that may begin now, as services/stages/generation.py asks."""
        found = []
        while self.routing.may_accept(self.server.policy_version):
            found.append(self.book.accept(protos.Prompt(text="1+1=")))
        assert self.book.outstanding <= self.routing.bound
        return found

    async def complete(self, *rewards: tuple[float, ...]) -> None:
        """Begin as many groups as may begin, which must be as many as there are rewards, and bring them in."""
        groups = self.accept()
        assert len(groups) == len(rewards)
        for group, values in zip(groups, rewards, strict=True):
            self.deliver(group, values)
            await self.training.pump()
            assert self.book.counts().balanced

    def deliver(self, group: Group, rewards: tuple[float, ...]) -> None:
        """A reward that is not a number: the sample is put aside."""
        for sample, value in zip(group.samples, rewards, strict=True):
            self.book.lease(sample, lease_id=1, server="rollout-0", deadline=9.0)
            version = self.server.policy_version
            self.book.generate(sample, made_trajectory(sample.key, version=version, baseline=sample.baseline))
            if isnan(value):
                self.book.quarantine(sample, "reward_invalid_value")
            else:
                self.book.score(sample, value=value, breakdown={}, route="r")

    def positions(self) -> list[int]:
        """The groups of the newest recorded batch."""
        return sorted({group for group, _ in self.book.batches[self.book.recorded_step].keys})

    @property
    def filtered(self) -> int:
        return self.book.counts().dropped.get("filtered", 0)


@pytest.fixture
def make_scene(make_config: MakeConfig, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(**run: int) -> Scene:
        made.append(Scene(make_config(run={**RUN, **run}), tmp_path / "ledger.sqlite"))
        return made[-1]

    yield make
    for scene in made:
        scene.ledger.close()


@pytest.fixture
async def trained_scene(make_scene: Callable[..., Scene]) -> AsyncIterator[tuple[Scene, Trainer]]:
    scene, trainer = make_scene(), Trainer()  # type: ignore[abstract]  # what it does not answer is UNIMPLEMENTED
    async with serving(lambda server: protos.add_TrainerServicer_to_server(trainer, server)) as address:
        await scene.training.connect(member("trainer", "trainer", address))
        await until(lambda: scene.training.ready)
        yield scene, trainer
        await scene.training.close()


async def test_groups_of_equal_reward_are_replaced_until_the_limit_of_the_step(
    trained_scene: tuple[Scene, Trainer],
) -> None:
    scene, trainer = trained_scene
    await scene.complete(EQUAL, DIFFERENT)
    assert (scene.filtered, scene.book.outstanding, scene.book.recorded_step) == (2, 2, 0)
    await scene.complete(EQUAL)  # one place only: the group that is kept holds the other
    await scene.complete(EQUAL)  # the third of this step: trained on
    await until(lambda: trainer.batches == [1])
    assert (scene.filtered, scene.positions()) == (4, [1, 3])
    trainer.trained(1)
    trainer.pushed(1)
    await until(lambda: scene.book.pushed_version == 1)
    await scene.complete(EQUAL, EQUAL)  # the next step has its own limit
    await scene.complete(DIFFERENT, EQUAL)
    await until(lambda: trainer.batches == [1, 2])
    assert (scene.filtered, scene.positions()) == (8, [6, 7])
    trainer.trained(2)
    await until(lambda: len(scene.batches) == 2)
    counts = scene.book.counts()
    assert (counts.accepted, counts.trained, counts.in_flight, counts.balanced) == (16, 8, 0, True)


async def test_a_run_of_equal_rewards_only_still_trains(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    for step in range(1, 4):
        await scene.complete(EQUAL, EQUAL)
        await scene.complete(EQUAL, EQUAL)
        assert (scene.book.recorded_step, scene.filtered) == (step, 4 * step)
        scene.book.train(step)
        scene.pushed(protos.PushReport(policy_version=step))
    assert scene.accept() == [], "no step is left"
    assert scene.book.counts().in_flight == 0


async def test_without_dynamic_sampling_equal_groups_are_trained_on(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(dynamic_sampling=0)
    await scene.complete(EQUAL, EQUAL)
    assert (scene.book.recorded_step, scene.filtered) == (1, 0)


async def test_an_equal_group_makes_room_while_others_are_still_generated(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    equal, slow = scene.accept()
    scene.deliver(equal, EQUAL)
    await scene.training.pump()
    assert scene.filtered == 2
    (another,) = scene.accept()
    assert (another.position, slow.unsettled) == (2, 2)


async def test_groups_for_later_steps_are_not_looked_at_before(make_scene: Callable[..., Scene]) -> None:
    """Rewards that come in any order: the limit is of the step that a group is meant for."""
    scene = make_scene(max_staleness=1, dynamic_sampling=1)
    first, second, third, fourth = (scene.book.accept(protos.Prompt()) for _ in range(4))
    for group, rewards in ((third, EQUAL), (fourth, EQUAL), (second, DIFFERENT), (first, DIFFERENT)):
        scene.deliver(group, rewards)
    await scene.training.pump()
    assert (scene.positions(), scene.book.recorded_step, scene.filtered) == ([0, 1], 1, 2)
    assert scene.book.complete == {3}, "one of two was dropped for step 2"


async def test_filtered_groups_are_found_as_such_in_the_ledger(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    await scene.complete(EQUAL, DIFFERENT)
    await scene.ledger.durable()
    scene.ledger.close()
    again = make_scene()
    assert dict(again.book.counts().dropped) == {"filtered": 2}
    assert again.book.counts().balanced and again.book.complete == {1}
    await again.complete(DIFFERENT)
    assert again.positions() == [1, 2]


async def test_a_group_with_one_sample_left_has_nothing_to_be_equal_to(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    scene.training.rules = scene.training.rules.model_copy(update={"min_group_samples": 1})  # type: ignore[attr-defined]
    group, other = scene.accept()
    scene.deliver(other, DIFFERENT)
    lonely, lost = group.samples
    scene.book.lease(lonely, lease_id=1, server="rollout-0", deadline=9.0)
    scene.book.generate(lonely, made_trajectory(lonely.key))
    scene.book.score(lonely, value=1.0, breakdown={}, route="r")
    scene.book.quarantine(lost, "reward_crash")
    await scene.training.pump()
    assert (scene.filtered, scene.book.batches[1].keys) == (0, [(0, 0), (1, 0), (1, 1)])


def test_one_sample_a_prompt_cannot_be_filtered(make_config: MakeConfig) -> None:
    with pytest.raises(ValidationError, match="one sample has no other to differ from"):
        make_config(
            run={**RUN, "group_size": 1},
            trainer={"model": "m", "algorithm": {"adv_estimator": "reinforce"}},
            rollout={"model": "m"},
        )
