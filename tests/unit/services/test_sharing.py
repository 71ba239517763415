"""Whose turn it is: from a recorded batch to its push the trainer's, else the rollout servers'."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

import protos
from services.errors import PeerError, PeerUnavailable
from services.records.book import Book, Group
from services.roster import Card, Member
from services.stages.sharing import Sharing
from tests.unit.services.life import Silence


class Hall(Sharing):
    """Notes what is asked of whom instead of calling; `answer` is the server's part."""

    def __init__(self, book: Book, members: list[Member], *, on: bool = True) -> None:
        self.evaluates = False
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[tuple[str, Card]] = []
        self.problems: list[tuple[str, str]] = []
        super().__init__(
            book,
            on=on,
            members=lambda: members,
            post=lambda message: message(),
            tell=lambda kind, service, message, **facts: self.events.append((kind, facts)),
            on_problem=lambda member, problem: self.problems.append((member.name, str(problem))),
            busy=lambda: self.evaluates,
        )

    def ask(self, member: Member, wanted: Card) -> None:
        self.asked.append((member.name, wanted))

    def answer(self, member: Member, wanted: Card, problem: PeerError | None = None) -> None:
        self.answered(member, wanted, problem)
        self.pump()

    def heard(self) -> list[tuple[str, Card]]:
        self.pump()
        heard, self.asked = self.asked, []
        return heard


@pytest.fixture
def book() -> Book:
    return Book(group_size=2, use_reference=False, max_attempts=2, journal=Silence())


def member(name: str, card: Card = "unknown") -> Member:
    return Member(name, "rollout", "127.0.0.1:1", f"process-{name}", protos.Identity(), 0.0, card=card)


def leased(book: Book) -> Group:
    group = book.accept(protos.Prompt(text="1+1="))
    for sample in group.samples:
        book.lease(sample, lease_id=1 + sample.index, server="a", deadline=9.0)
    return group


def finished(book: Book, group: Group) -> None:
    for sample in group.samples:
        trajectory = protos.Trajectory(spans=[protos.VersionSpan(policy_version=0, num_tokens=1)])
        book.generate(sample, trajectory)
        book.score(sample, value=1.0, breakdown={}, route="r")


def record(book: Book, group: Group) -> None:
    book.record(book.recorded_step + 1, [group])


def test_a_step_goes_round_from_leases_to_leases(book: Book) -> None:
    one, two = member("a"), member("b")
    hall = Hall(book, [one, two])
    assert hall.heard() == [("a", "awake"), ("b", "awake")] and not hall.may_lease(one)
    hall.answer(one, "awake")
    assert hall.may_lease(one) and not hall.may_lease(two) and hall.heard() == []
    hall.answer(two, "awake")
    group, straggler = leased(book), leased(book)
    finished(book, group)
    assert hall.heard() == [] and hall.may_lease(one)
    record(book, group)
    assert not hall.may_lease(one), "no more leases from the batch on"
    assert hall.heard() == [] and not hall.may_train(1), "what is leased may come in"
    finished(book, straggler)
    assert hall.heard() == [("a", "asleep"), ("b", "asleep")]
    hall.answer(one, "asleep")
    assert not hall.may_train(1)
    hall.answer(two, "asleep")
    assert hall.may_train(1) and not hall.may_train(2)
    book.train(1)
    hall.trained(1)
    assert hall.heard() == [] and not hall.may_lease(one), "until the version is pushed"
    hall.pushed(one)
    book.push(1)
    assert hall.heard() == [("a", "awake"), ("b", "awake")]
    for each in (one, two):
        hall.answer(each, "awake")
    assert hall.may_lease(one) and hall.may_lease(two)
    assert hall.events == [("sleep", {"step": 1}), ("trained", {"step": 1}), ("wake", {"version": 1})]


def test_who_joins_in_the_trainers_turn_must_sleep_before_it_goes_on(book: Book) -> None:
    one = member("a", "asleep")
    members = [one]
    hall = Hall(book, members)
    record_one(book)
    assert hall.heard() == [] and hall.may_train(1)
    members[0] = newcomer = member("a")
    assert not hall.may_train(1)
    assert hall.heard() == [("a", "asleep")]
    hall.answer(newcomer, "asleep")
    assert hall.may_train(1)


def test_nobody_waits_for_the_dead(book: Book) -> None:
    one = member("a", "awake")
    members = [one]
    hall = Hall(book, members)
    record_one(book)
    assert hall.heard() == [("a", "asleep")] and not hall.may_train(1)
    members.clear()
    assert hall.may_train(1), "the trainer has the card for itself"
    problem = PeerUnavailable("letting a sleep: gone", code=grpc.StatusCode.UNAVAILABLE)
    hall.answer(one, "asleep", problem)
    assert hall.problems == [("a", "letting a sleep: gone")] and one.card == "unknown"


def test_recorded_steps_are_trained_one_by_one_with_sleep_between(book: Book) -> None:
    one = member("a", "asleep")
    hall = Hall(book, [one])
    record_one(book)
    record_one(book)
    assert hall.heard() == [] and hall.may_train(1) and not hall.may_train(2)
    book.train(1)
    hall.pushed(one)
    book.push(1)
    assert not hall.may_train(2), "the push has woken it"
    assert hall.heard() == [("a", "asleep")]
    hall.answer(one, "asleep")
    assert hall.may_train(2)
    assert [facts for kind, facts in hall.events if kind == "sleep"] == [{"step": 1}, {"step": 2}]


def test_an_answer_that_a_push_has_overtaken_is_not_believed(book: Book) -> None:
    one = member("a", "awake")
    hall = Hall(book, [one])
    record_one(book)
    assert hall.heard() == [("a", "asleep")]
    hall.pushed(one)
    hall.answered(one, "asleep", None)
    assert not hall.may_train(1) and hall.heard() == [("a", "asleep")]


def test_without_time_sharing_everybody_works_and_nobody_is_asked(book: Book) -> None:
    one = member("a")
    hall = Hall(book, [one], on=False)
    group = leased(book)
    assert hall.may_lease(one) and hall.may_train(1) and hall.may_train(7)
    finished(book, group)
    record(book, group)
    hall.trained(1)
    assert hall.heard() == [] and not hall.trains and hall.may_lease(one) and hall.events == []


def record_one(book: Book) -> None:
    group = leased(book)
    finished(book, group)
    record(book, group)


def test_the_card_changes_hands_only_when_the_samples_of_an_evaluation_are_in_too(book: Book) -> None:
    one = member("a", "awake")
    hall = Hall(book, [one])
    group = leased(book)
    finished(book, group)
    record(book, group)
    hall.evaluates = True
    assert hall.heard() == [] and not hall.may_lease(one) and not hall.may_train(1)
    hall.evaluates = False
    assert hall.heard() == [("a", "asleep")]
    hall.answer(one, "asleep")
    assert hall.may_train(1)
