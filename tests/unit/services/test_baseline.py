"""A greedy sample beside each group: booked, let in and found again like the others, and told apart from them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import protos
from services.compose import load_config
from services.records.book import Book, Group, Journal, Sample, State
from services.records.ledger import Ledger
from services.records.recovery import recover
from services.roster import Member, Roster
from services.stages.filtering import has_equal_rewards
from services.stages.generation import greedy, within_budget
from services.stages.routing import Routing
from tests.unit.services.life import Silence, made_trajectory
from tests.unit.services.test_compose import problems_of, recipe_file


def new_book(journal: Journal | None = None, *, group_size: int = 2, use_reference: bool = False) -> Book:
    return Book(
        group_size=group_size,
        with_baseline=True,
        use_reference=use_reference,
        max_attempts=3,
        journal=journal or Silence(),
    )


def scored(book: Book, sample: Sample, *, value: float = 1.0, version: int = 0) -> None:
    book.lease(sample, lease_id=1, server="rollout-0", deadline=1.0)
    book.generate(sample, made_trajectory(sample.key, version=version, baseline=sample.baseline))
    book.score(sample, value=value, breakdown={}, route="r@1")


def completed(book: Book, *rewards: float) -> Group:
    group = book.accept(protos.Prompt())
    for sample, value in zip(group.samples, rewards, strict=True):
        scored(book, sample, value=value)
    return group


def test_the_sample_behind_the_drawn_ones_is_the_baseline() -> None:
    book = new_book()
    group = completed(book, 1.0, 0.0, 0.5)
    assert [(sample.index, sample.baseline) for sample in group.samples] == [(0, False), (1, False), (2, True)]
    assert group.drawn() == group.samples[:2] and group.baseline() is group.samples[2]
    assert book.find(protos.SampleKey(group=0, index=2)) is group.samples[2]
    assert (book.accepted, book.outstanding) == (3, 3)


def test_it_goes_into_the_batch_and_counts_there_like_every_sample() -> None:
    book = new_book()
    batch = book.record(1, [completed(book, 1.0, 0.0, 0.5)])
    assert batch.keys == [(0, 0), (0, 1), (0, 2)]
    assert [trajectory.baseline for trajectory in batch.trajectories] == [False, False, True]
    assert book.train(1)
    book.push(1)
    counts = book.counts()
    assert (counts.accepted, counts.trained, counts.balanced, book.outstanding) == (3, 3, True, 0)


def test_without_baselines_no_sample_is_one() -> None:
    """A run that goes on with smaller groups still has samples of that index."""
    book = Book(group_size=2, use_reference=False, max_attempts=3, journal=Silence())
    assert not book.is_baseline(2) and new_book().is_baseline(2)


def test_its_age_is_that_of_the_group_too() -> None:
    book = new_book()
    group = book.accept(protos.Prompt())
    for sample, version in zip(group.samples, (5, 4, 3), strict=True):
        scored(book, sample, version=version)
    assert group.oldest_version() == 3


def test_it_needs_no_reference_logprobs() -> None:
    book = new_book(use_reference=True)
    group = completed(book, 1.0, 0.0, 0.5)
    assert [sample.state for sample in group.samples] == [State.SCORED, State.SCORED, State.REFERENCED]


def test_a_group_that_lost_it_has_none() -> None:
    book = new_book()
    group = book.accept(protos.Prompt())
    for sample in group.samples[:2]:
        scored(book, sample)
    book.quarantine(group.samples[2], "reward_crash")
    assert group.baseline() is None and book.complete == {0}


@pytest.mark.parametrize(("rewards", "equal"), [((1, 1, 0), True), ((1, 0, 1), False), ((1, 1, 1), True)])
def test_equal_rewards_are_those_of_the_drawn_samples(rewards: tuple[float, ...], equal: bool) -> None:
    assert has_equal_rewards(completed(new_book(), *rewards)) == equal


def test_one_drawn_sample_has_only_its_baseline_to_be_equal_to() -> None:
    assert not has_equal_rewards(completed(new_book(group_size=1), 1.0, 1.0))


def test_admission_counts_it() -> None:
    roster, book = Roster(heartbeat_seconds=1.0), new_book()
    run = SimpleNamespace(num_steps=9, prompts_per_step=2, max_staleness=1)
    routing = Routing(roster, book, run, max_version_skew=1)
    member = Member("rollout-0", "rollout", "h:1", "p", protos.Identity(), 0.0)
    member.has_version = True
    roster.members["rollout-0"] = member
    assert routing.bound == 2 * 2 * 3
    links = [SimpleNamespace(name="rollout-0", credit=credit, in_hand=0) for credit in (2, 3)]
    assert [link.credit for link, _ in routing.in_order(links)] == [3]  # type: ignore[arg-type]
    while routing.may_accept(0):
        book.accept(protos.Prompt())
    assert (len(book.groups), book.outstanding) == (4, 12)


def test_a_conductor_that_comes_back_knows_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    book = new_book(ledger, use_reference=True)
    book.accept(protos.Prompt())
    completed(book, 1.0, 0.0, 0.5)
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")
    found = new_book(again, use_reference=True)
    assert recover(found, again)
    groups = [[(sample.baseline, sample.state) for sample in group.samples] for group in found.groups.values()]
    assert groups == [
        [(False, State.PENDING), (False, State.PENDING), (True, State.PENDING)],
        [(False, State.SCORED), (False, State.SCORED), (True, State.REFERENCED)],
    ]
    marks = [s.trajectory is not None and s.trajectory.baseline for s in found.groups[1].samples]
    assert marks == [False, False, True]
    assert (found.accepted, found.outstanding, found.next_group) == (6, 6, 2)
    again.close()


def test_it_is_drawn_greedily_and_otherwise_as_the_run_says() -> None:
    sampling = protos.SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=8, stop=["x"], ignore_eos=True)
    found = within_budget(greedy(sampling), protos.Prompt(extra={"max_tokens": "3"}))
    assert found.temperature == 0 and sampling.temperature == pytest.approx(0.7)
    found.temperature, found.max_tokens = sampling.temperature, sampling.max_tokens
    assert found == sampling


# What the config must count.

REMAX = "trainer.algorithm.adv_estimator=remax"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["run.group_size=64"], "run.group_size=64 and a baseline is larger than twice rollout.max_num_seqs=32"),
        (
            ["run.max_staleness=0", "run.prompts_per_step=13"],
            "run.max_staleness=0 needs the 65 samples of a step at once, and the rollout servers take 64",
        ),
    ],
)
def test_what_fits_without_the_baseline_may_not_fit_with_it(tmp_path: Path, overrides: list[str], problem: str) -> None:
    load_config(recipe_file(tmp_path), overrides)
    (found,) = problems_of(recipe_file(tmp_path), [*overrides, REMAX])
    assert problem in found


def test_an_estimator_of_the_users_own_may_ask_for_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def over(inputs, options): ...\nover.with_baseline = True\ndef plain(inputs, options): ...\n")
    for name, asked in (("over", True), ("plain", False)):
        config = load_config(recipe_file(tmp_path), [f"trainer.algorithm.adv_estimator={file}:{name}"])
        assert config.trainer.algorithm.with_baseline == asked


def test_minibatches_divide_the_samples_that_are_trained_on(tmp_path: Path) -> None:
    load_config(recipe_file(tmp_path), [REMAX, "trainer.algorithm.minibatches=16"])
    (found,) = problems_of(recipe_file(tmp_path), [REMAX, "trainer.algorithm.minibatches=5"])
    assert "= 16 samples cannot be cut" in found


def test_one_sample_and_its_baseline_are_a_group(tmp_path: Path) -> None:
    config = load_config(recipe_file(tmp_path), [REMAX, "run.group_size=1"])
    assert config.trainer.algorithm.with_baseline and config.rules().min_group_samples == 1
