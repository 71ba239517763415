"""The ledger: whatever happens, a new book is found in the file as the old one stood, and a failed write is heard."""

import asyncio
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule

import protos
from protos.arrays import to_array
from services.records.book import Batch, Book, Journal, Sample, State
from services.records.ledger import Ledger, key_of, row_id
from services.records.recovery import recover
from tests.unit.services.life import LifeOfSamples, made_trajectory


def wire(trajectories: list[protos.Trajectory]) -> list[bytes]:
    return [trajectory.SerializeToString(deterministic=True) for trajectory in trajectories]


def told(batches: dict[int, Batch]) -> list[tuple[int, list[tuple[int, int]], list[bytes], dict[int, int]]]:
    """Batches in their order, bytes and all."""
    return [(step, batch.keys, wire(batch.trajectories), dict(batch.staleness)) for step, batch in batches.items()]


def standing(book: Book) -> dict[str, object]:
    """All of a book that must outlive its process; a lease does not."""
    places = {
        sample.key: (
            State.PENDING if sample.state is State.LEASED else sample.state,
            sample.oldest_version,
            sample.baseline,
        )
        for group in book.groups.values()
        for sample in group.samples
    }
    carried = {
        sample.key: wire([sample.trajectory]) for sample in book.samples(*State) if sample.trajectory is not None
    }
    return {
        "places": places,
        "trajectories": carried,
        "groups": {position: group.prompt for position, group in book.groups.items()},
        "unsettled": {position: group.unsettled for position, group in book.groups.items()},
        "complete": book.complete,
        "batches": told(book.batches),
        "unpushed": book.unpushed,
        "outstanding": book.outstanding,
        "staleness": +book.staleness,
        "totals": (book.accepted, book.trained, book.quarantined, dict(book.dropped)),
        "positions": (book.next_group, book.recorded_step, book.trained_step, book.pushed_version),
    }


class Journalled(LifeOfSamples):
    """Every order of events, told to a real file; the conductor may die at any point and go on from it."""

    def make_journal(self) -> Journal:
        self.folder = Path(tempfile.mkdtemp())
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        return self.ledger

    def recorded_after(self, step: int) -> list[Batch]:
        asyncio.run(self.ledger.durable())
        return self.ledger.batches(after=step)

    @rule()
    def commit(self) -> None:
        """A boundary between two transactions."""
        asyncio.run(self.ledger.durable())

    @precondition(lambda self: self.place)
    @rule()
    def conductor_dies_and_comes_back(self) -> None:
        """The file is opened again while the old process still holds it."""
        asyncio.run(self.ledger.durable())
        before = self.ledger
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        found = self.make_book(self.ledger)
        assert recover(found, self.ledger)
        assert standing(found) == standing(self.book)
        pending = {key for key, place in self.place.items() if place in ("pending", "leased")}
        assert {sample.key for sample in found.pending} == pending
        self.place.update(dict.fromkeys(pending, "pending"))
        self.book, self.refused = found, 0
        before.close()

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            if self.place:
                self.conductor_dies_and_comes_back()
            self.ledger.close()
            shutil.rmtree(self.folder)


TestJournalled = Journalled.TestCase
TestJournalled.settings = settings(derandomize=True, max_examples=40, stateful_step_count=50, deadline=None)


# Hand-made.


@pytest.fixture
def make_ledger(tmp_path: Path) -> Callable[[], Ledger]:
    return lambda: Ledger(tmp_path / "run" / "ledger.sqlite")


def new_book(journal: Journal, *, use_reference: bool = True) -> Book:
    return Book(group_size=2, use_reference=use_reference, max_attempts=3, journal=journal)


def finish(book: Book, sample: Sample, *, version: int = 0) -> None:
    """Bring a pending sample to where it can be trained on."""
    book.lease(sample, lease_id=1, server="rollout-0", deadline=1.0)
    book.generate(sample, made_trajectory(sample.key, version=version))
    book.score(sample, value=0.1, breakdown={"exact": 0.1, "length": -1e300}, route="exact@1+length@2")
    book.refer(sample, to_array(np.full(2, -0.25, np.float32)))


def train_steps(book: Book, count: int) -> list[Batch]:
    batches = []
    for _ in range(count):
        group = book.accept(protos.Prompt(prompt_id="p"))
        for sample in group.samples:
            finish(book, sample, version=book.pushed_version)
        batches.append(book.record(book.recorded_step + 1, [group]))
        book.train(book.recorded_step)
        book.push(book.recorded_step)
    return batches


def rows(ledger: Ledger, query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(ledger.path) as connection:
        found = connection.execute(query).fetchall()
    connection.close()
    return found


async def test_a_batch_comes_back_byte_for_byte_in_the_recorded_order(make_ledger: Callable[[], Ledger]) -> None:
    ledger = make_ledger()
    book = new_book(ledger)
    groups = [book.accept(protos.Prompt(prompt_id=f"p{index}")) for index in range(3)]
    for group in reversed(groups):
        for sample in reversed(group.samples):
            finish(book, sample)
    batch = book.record(1, [groups[2], groups[0]])
    await ledger.durable()
    (found,) = ledger.batches(after=0)
    assert found.keys == batch.keys == [(2, 0), (2, 1), (0, 0), (0, 1)]
    assert wire(found.trajectories) == wire(batch.trajectories)
    assert found.staleness == batch.staleness
    assert ledger.batches(after=0, trained=True) == ledger.batches(after=1) == []
    ledger.close()


async def test_a_whole_life_in_one_transaction_ends_where_it_ended(make_ledger: Callable[[], Ledger]) -> None:
    """The rows of a thousand samples wait in any order of their stages, and are written in the order of a life."""
    ledger = make_ledger()
    book = new_book(ledger)
    last = book.accept(protos.Prompt(prompt_id="last"))
    first = book.accept(protos.Prompt(prompt_id="first"))
    for sample in first.samples:
        finish(book, sample)
    book.record(1, [first])
    book.train(1)
    for sample in last.samples:  # generated and scored after `first` was batched: in the same transaction all the same
        finish(book, sample)
    book.drop_group(last, "stale")
    await ledger.durable()
    states = rows(ledger, "SELECT id, state, step, reason FROM samples ORDER BY id")
    assert states == [
        (row_id((0, 0)), State.DROPPED, None, "stale"),
        (row_id((0, 1)), State.DROPPED, None, "stale"),
        (row_id((1, 0)), State.BATCHED, 1, None),
        (row_id((1, 1)), State.BATCHED, 1, None),
    ]
    ledger.close()


async def test_trained_then_rewound_then_trained_in_one_transaction_is_trained(
    make_ledger: Callable[[], Ledger],
) -> None:
    ledger = make_ledger()
    book = new_book(ledger)
    batches = train_steps(book, 2)
    book.rewind(0, batches)
    book.train(1)
    await ledger.durable()
    assert rows(ledger, "SELECT step, trained FROM batches ORDER BY step") == [(1, 1), (2, 0)]
    assert ledger.fact("pushed_version") == "0"
    ledger.close()


async def test_pruning_forgets_payloads_and_keeps_rows(make_ledger: Callable[[], Ledger]) -> None:
    ledger = make_ledger()
    book = new_book(ledger)
    train_steps(book, 3)
    ledger.prune(before_step=3)
    await ledger.durable()
    assert rows(ledger, "SELECT COUNT(*) FROM trajectories") == [(2,)]
    assert rows(ledger, "SELECT COUNT(*) FROM reference_logprobs") == [(2,)]
    assert rows(ledger, "SELECT COUNT(*) FROM samples") == [(6,)]
    found = new_book(ledger)
    recover(found, ledger)
    assert (found.trained, found.staleness, found.counts().balanced) == (6, book.staleness, True)
    assert ledger.trajectory(row_id((0, 0))) is None
    kept = ledger.trajectory(row_id((2, 0)))
    assert kept is not None and kept.reward == 0.1
    ledger.close()


async def test_a_leased_sample_is_pending_again_and_an_unsettled_one_keeps_its_place(
    make_ledger: Callable[[], Ledger],
) -> None:
    ledger = make_ledger()
    book = new_book(ledger)
    leased, half_done = book.accept(protos.Prompt(prompt_id="p", text="why?")).samples
    book.lease(leased, lease_id=1, server="rollout-0", deadline=1.0)
    book.lease(half_done, lease_id=1, server="rollout-0", deadline=1.0)
    book.generate(half_done, made_trajectory(half_done.key))
    book.refer(half_done, to_array(np.zeros(2, np.float32)))
    ledger.close()
    again = make_ledger()
    found = new_book(again)
    assert recover(found, again)
    assert [sample.key for sample in found.pending] == [(0, 0)]
    (sample,) = found.samples(State.GENERATED)
    assert sample.trajectory is not None and sample.trajectory.HasField("reference_logprobs")
    assert found.groups[0].prompt.text == "why?"
    found.score(sample, value=1.0, breakdown={}, route="r@1")
    assert sample.state is State.REFERENCED
    again.close()


def test_an_empty_ledger_holds_no_run(make_ledger: Callable[[], Ledger]) -> None:
    ledger = make_ledger()
    assert not recover(new_book(ledger), ledger)
    ledger.close()


def test_facts_are_the_last_said(make_ledger: Callable[[], Ledger]) -> None:
    ledger = make_ledger()
    for value in ("1", "2"):
        ledger.set_fact("incarnation", value)
    ledger.close()
    again = make_ledger()
    assert (again.fact("incarnation"), again.fact("nothing", "default")) == ("2", "default")
    again.close()


@pytest.mark.parametrize("key", [(0, 0), (0, 65535), (1, 0), (2**46, 12345)])
def test_a_row_id_names_one_sample(key: tuple[int, int]) -> None:
    assert key_of(row_id(key)) == key


# What can go wrong.


async def test_a_full_disk_is_heard_by_whoever_waits_and_nothing_is_written_after_it(
    make_ledger: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_small_disk(path: Path, synchronous: str) -> sqlite3.Connection:
        connection = connect(path, synchronous)
        connection.execute("PRAGMA max_page_count = 40")  # SQLite itself then says that the disk is full
        return connection

    from services.records.commit import connect

    monkeypatch.setattr("services.records.commit.connect", on_a_small_disk)
    ledger = make_ledger()
    book = new_book(ledger)
    train_steps(book, 1)
    await ledger.durable()
    book.accept(protos.Prompt(prompt_id="large", text="x" * 1_000_000))
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            await ledger.durable()
        ledger.set_fact("small", "enough to fit")  # what builds on a lost transaction must not be there without it
    assert ledger.problem is not None
    ledger.close()
    monkeypatch.undo()
    again = make_ledger()
    assert again.fact("small", "not there") == "not there"
    found = new_book(again)
    recover(found, again)
    assert (found.trained, found.accepted) == (2, 2)
    again.close()


async def test_a_row_that_sqlite_cannot_hold_is_heard(make_ledger: Callable[[], Ledger]) -> None:
    ledger = make_ledger()
    book = new_book(ledger)
    sample = book.accept(protos.Prompt()).samples[0]
    book.lease(sample, lease_id=1, server="rollout-0", deadline=1.0)
    book.generate(sample, made_trajectory(sample.key, version=2**63))
    with pytest.raises(OverflowError):
        await ledger.durable()
    assert isinstance(ledger.problem, OverflowError)
    ledger.close()


async def test_a_closed_ledger_takes_nothing_and_keeps_nobody_waiting(make_ledger: Callable[[], Ledger]) -> None:
    ledger = make_ledger()
    ledger.close()
    ledger.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        await ledger.durable()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        ledger.set_fact("late", "1")


async def test_whoever_stops_waiting_does_not_stop_the_writer(make_ledger: Callable[[], Ledger]) -> None:
    ledger = make_ledger()
    for number in range(20):
        ledger.set_fact("number", str(number))
        waiting = asyncio.ensure_future(ledger.durable())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await ledger.durable()
    assert ledger.fact("number") == "19"
    ledger.close()


def test_rows_are_written_soon_although_nobody_waits(make_ledger: Callable[[], Ledger]) -> None:
    ledger = make_ledger()
    ledger.set_fact("quiet", "1")
    looks = 0
    while ledger.fact("quiet") != "1":
        looks += 1
        assert looks < 1000
        time.sleep(0.005)
    ledger.close()
