"""The book: hand-made lives of samples, and any order of events against a plain dictionary."""

import numpy as np
import pytest
from hypothesis import settings

import protos
from protos.arrays import to_array
from services.records.book import Book, Group, Journal, Sample, State
from tests.unit.services.life import BOUND, LifeOfSamples, Silence, made_trajectory


def new_book(*, group_size: int = 2, use_reference: bool = False) -> Book:
    return Book(group_size=group_size, use_reference=use_reference, max_attempts=3, journal=Silence())


def accept(book: Book) -> Group:
    return book.accept(protos.Prompt(prompt_id="p"))


def generated(book: Book, sample: Sample, *, version: int = 0) -> Sample:
    book.lease(sample, lease_id=7, server="rollout-0", deadline=1.0)
    book.generate(sample, made_trajectory(sample.key, lease_id=7, version=version))
    return sample


def scored(book: Book, sample: Sample, *, version: int = 0) -> Sample:
    book.score(generated(book, sample, version=version), value=1.0, breakdown={"exact": 1.0}, route="r@1")
    return sample


def recorded(book: Book, *, version: int = 0) -> Group:
    """Bring a new group all the way into the next batch."""
    group = accept(book)
    for sample in group.samples:
        scored(book, sample, version=version)
    book.record(book.recorded_step + 1, [group])
    return group


def key(sample: Sample) -> protos.SampleKey:
    return protos.SampleKey(group=sample.group, index=sample.index)


def test_a_sample_goes_the_whole_way() -> None:
    book = new_book()
    group = recorded(book)
    assert dict(book.counts().states) == {"batched": 2}
    assert book.train(1)
    counts = book.counts()
    assert (counts.accepted, counts.trained, counts.in_flight, counts.balanced) == (2, 2, 0, True)
    assert book.outstanding == 2, "room is made by the push, not by the step"
    book.push(1)
    assert (book.outstanding, book.pushed_version, book.groups) == (0, 1, {})
    assert [sample.state for sample in group.samples] == [State.BATCHED] * 2


def test_every_change_is_told_to_the_journal() -> None:
    book = new_book(use_reference=True)
    group = accept(book)
    for sample in group.samples:
        book.refer(scored(book, sample), to_array(np.zeros(2, np.float32)))
    book.record(1, [group])
    book.train(1)
    book.push(1)
    assert isinstance(book.journal, Silence)
    expected = {"accepted": 1, "generated": 2, "scored": 2, "referenced": 2, "batched": 1, "trained": 1, "pushed": 1}
    assert book.journal.told == expected


def test_the_score_lands_in_the_trajectory() -> None:
    book = new_book()
    sample = scored(book, accept(book).samples[0])
    assert sample.trajectory is not None
    assert (sample.trajectory.reward, sample.trajectory.reward_route) == (1.0, "r@1")
    assert dict(sample.trajectory.reward_breakdown) == {"exact": 1.0}


@pytest.mark.parametrize("reward_first", [True, False])
def test_reward_and_reference_may_come_in_either_order(reward_first: bool) -> None:
    book = new_book(group_size=1, use_reference=True)
    group = accept(book)
    sample = generated(book, group.samples[0])
    logprobs = to_array(np.zeros(2, np.float32))
    if not reward_first:
        book.refer(sample, logprobs)
    book.score(sample, value=0.0, breakdown={}, route="r@1")
    assert (sample.state is State.REFERENCED) != reward_first
    if reward_first:
        book.refer(sample, logprobs)
    assert sample.state is State.REFERENCED and book.complete == {group.position}


def test_a_late_and_a_repeated_delivery_are_refused_and_counted() -> None:
    book = new_book()
    sample, other = accept(book).samples
    generated(book, sample)
    assert book.leased(key(sample), 7) is None
    book.lease(other, lease_id=8, server="rollout-0", deadline=1.0)
    book.redo(other)
    book.lease(other, lease_id=9, server="rollout-1", deadline=1.0)
    assert book.leased(key(other), 8) is None
    assert book.leased(key(other), 9) is other
    assert book.leased(protos.SampleKey(group=99, index=0), 1) is None
    assert book.leased(protos.SampleKey(group=0, index=2), 1) is None, "an index beyond the group"
    assert book.refused == {"duplicate": 3, "late": 1}


def test_a_sample_given_back_waits_in_the_redo_queue_once_and_counts_its_attempts() -> None:
    book = new_book()
    sample = accept(book).samples[0]
    book.lease(sample, lease_id=1, server="rollout-0", deadline=1.0)
    book.redo(sample)
    assert list(book.pending) == [sample]
    assert (sample.attempts, sample.server, sample.lease_id) == (1, "", 0)


def test_a_group_whose_samples_are_all_quarantined_is_gone() -> None:
    book = new_book()
    for sample in accept(book).samples:
        book.quarantine(generated(book, sample), "reward_crash")
    assert (book.groups, book.complete, book.outstanding) == ({}, set(), 0)
    assert book.counts().quarantined == 2 and book.counts().balanced


def test_a_group_that_lost_a_sample_is_trained_on_with_the_rest() -> None:
    book = new_book(group_size=3)
    group = accept(book)
    book.quarantine(generated(book, group.samples[1]), "reward_crash")
    for sample in (group.samples[2], group.samples[0]):
        scored(book, sample)
    assert book.complete == {0}
    assert book.record(1, [group]).keys == [(0, 0), (0, 2)]
    assert book.counts().balanced


def test_a_dropped_group_is_counted_by_reason_and_makes_room() -> None:
    book = new_book()
    group = accept(book)
    for sample in group.samples:
        scored(book, sample)
    book.drop_group(group, "stale")
    assert dict(book.counts().dropped) == {"stale": 2}
    assert (book.outstanding, book.groups) == (0, {})


def test_staleness_is_counted_from_the_oldest_token_when_the_step_is_trained() -> None:
    book = new_book()
    for _ in range(2):
        recorded(book)
        book.train(book.recorded_step)
        book.push(book.recorded_step)
    recorded(book, version=1)
    assert book.batches[3].staleness == {1: 2}
    assert book.staleness == {0: 2, 1: 2}
    book.train(3)
    assert book.staleness == {0: 2, 1: 4}


def test_a_report_that_comes_twice_counts_once() -> None:
    book = new_book()
    recorded(book)
    assert book.train(1) and not book.train(1)
    assert (book.trained, book.refused["report"]) == (2, 1)


def test_a_trainer_that_lost_two_steps_has_them_open_again() -> None:
    book = new_book()
    batches = []
    for _ in range(3):
        recorded(book)
        step = book.recorded_step
        batches.append(book.batches[step])
        book.train(step)
        book.push(step)
    assert (book.trained, book.outstanding) == (6, 0)
    book.rewind(1, batches[1:])
    assert (book.trained, book.trained_step, book.pushed_version, book.outstanding) == (2, 1, 1, 4)
    assert list(book.batches) == [2, 3]
    assert +book.staleness == {0: 2}
    for step in (2, 3):
        assert book.train(step)
    book.push(3)
    assert (book.trained, book.outstanding, book.counts().balanced) == (6, 0, True)


def test_a_push_of_an_older_version_takes_nothing_back() -> None:
    book = new_book()
    for _ in range(2):
        recorded(book)
        book.train(book.recorded_step)
        book.push(book.recorded_step)
    book.push(1)
    assert book.pushed_version == 2


def test_a_quarantined_sample_makes_no_room_for_a_group_of_the_next_step() -> None:
    life = AnyOrder()
    life.book = life.make_book(Silence())
    while life.may_accept():
        life.accept()
    assert life.book.outstanding == BOUND
    life.lease(0)
    life.quarantine(0)
    assert life.book.outstanding == BOUND - 1 and not life.may_accept()


@pytest.mark.parametrize("step", [0, 2])
def test_steps_are_recorded_in_order(step: int) -> None:
    with pytest.raises(AssertionError):
        new_book().record(step, [])


def test_what_cannot_happen_stops_the_run() -> None:
    book = new_book()
    sample, other = accept(book).samples
    with pytest.raises(AssertionError):
        book.generate(sample, made_trajectory(sample.key))  # nobody has leased it
    with pytest.raises(AssertionError):
        book.redo(sample)
    scored(book, sample)
    with pytest.raises(AssertionError):
        book.score(sample, value=1.0, breakdown={}, route="r@1")
    with pytest.raises(AssertionError):
        book.lease(sample, lease_id=2, server="rollout-0", deadline=1.0)
    book.quarantine(generated(book, other), "reward_crash")
    with pytest.raises(AssertionError):
        book.quarantine(other, "reward_crash")


class AnyOrder(LifeOfSamples):
    """Every order of events that services/ can bring about."""

    def make_journal(self) -> Journal:
        return Silence()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(derandomize=True, max_examples=150, stateful_step_count=80, deadline=None)
