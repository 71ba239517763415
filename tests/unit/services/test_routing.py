"""Which server takes which lease while versions differ, by numbers that are worked out by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

import protos
from services.records.book import Book
from services.roster import Member, Roster
from services.stages.routing import Routing
from tests.unit.services.life import Silence, made_trajectory

STEP = 4
"""Samples of a step: two groups of two."""


def new_routing(*versions: int | None, max_staleness: int = 0, skew: int = 1) -> Routing:
    """rollout-0, rollout-1, ... with these versions; None has none yet."""
    roster = Roster(heartbeat_seconds=1.0)
    for index, version in enumerate(versions):
        member = Member(f"rollout-{index}", "rollout", "h:1", f"p{index}", protos.Identity(), 0.0)
        member.has_version, member.policy_version = version is not None, version or 0
        roster.members[member.name] = member
    book = Book(group_size=2, use_reference=False, max_attempts=3, journal=Silence())
    run = SimpleNamespace(num_steps=100, prompts_per_step=2, group_size=2, max_staleness=max_staleness)
    return Routing(roster, book, run, max_version_skew=skew)


def accept(routing: Routing, groups: int) -> None:
    for _ in range(groups):
        routing.book.accept(protos.Prompt())


def train_a_step(routing: Routing) -> None:
    """Two groups go all the way into a trained step."""
    book = routing.book
    accept(routing, 2)
    positions = sorted(book.groups)[:2]
    for group in [book.groups[position] for position in positions]:
        for sample in group.samples:
            book.lease(sample, lease_id=1, server="rollout-0", deadline=1.0)
            book.generate(sample, made_trajectory(sample.key, version=book.recorded_step))
            book.score(sample, value=1.0, breakdown={}, route="r")
    book.record(book.recorded_step + 1, [book.groups[position] for position in positions])
    book.train(book.recorded_step)


def links(*in_hand: int, credit: int = 100) -> list[Any]:
    return [SimpleNamespace(name=f"rollout-{index}", credit=credit, in_hand=held) for index, held in enumerate(in_hand)]


def order(routing: Routing, found: list[Any]) -> list[str]:
    return [link.name for link, _ in routing.in_order(found)]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_server_is_let_in_by_its_own_version_and_never_beyond_the_bound(max_staleness: int) -> None:
    routing = new_routing(1, 0, max_staleness=max_staleness)
    train_a_step(routing)
    assert routing.book.outstanding == STEP, "no push has been booked: step 1 still counts for a server of version 0"
    accepted = {version: 0 for version in (0, 1)}
    while routing.may_accept(0):
        accept(routing, 1)
        accepted[0] += 2
    while routing.may_accept(1):
        accept(routing, 1)
        accepted[1] += 2
    assert accepted[0] == max_staleness * STEP, "what it begins is trained in step max_staleness + 1 at the latest"
    assert accepted[1] == STEP, "and a server of version 1 may begin one step more"


def test_the_booked_version_is_the_one_that_every_server_has() -> None:
    routing = new_routing(3, 1, None)
    assert routing.floor(3) == 1 and routing.newest() == 3
    routing.roster.members["rollout-1"].policy_version = 3
    assert routing.floor(3) == 3
    assert new_routing().floor(7) == 7, "nobody is behind where nobody is"


def test_a_server_that_lags_more_than_allowed_takes_no_leases_until_it_is_current() -> None:
    routing = new_routing(5, 4, 3, None)
    assert [routing.serves(f"rollout-{index}") for index in range(5)] == [True, True, False, False, False]
    routing.roster.members["rollout-2"].policy_version = 5
    assert routing.serves("rollout-2")
    routing.roster.evict("rollout-2", "why")
    assert not routing.serves("rollout-2")
    assert [new_routing(5, 4, skew=0).serves(name) for name in ("rollout-0", "rollout-1")] == [True, False]


def test_the_newest_version_comes_first_then_who_has_least_in_hand() -> None:
    routing = new_routing(1, 2, 2, max_staleness=8)
    assert order(routing, links(0, 4, 2)) == ["rollout-2", "rollout-1", "rollout-0"]
    assert order(routing, links(0, 4, 2, credit=1)) == []


def test_while_versions_differ_nobody_gets_more_than_its_share() -> None:
    """Bound 8 on two servers: 4 each."""
    mixed, equal = new_routing(1, 2, max_staleness=1), new_routing(2, 2, max_staleness=1)
    assert order(mixed, links(0, 4)) == ["rollout-0"]
    assert order(mixed, links(0, 2)) == ["rollout-1", "rollout-0"]
    assert order(equal, links(0, 6)) == ["rollout-0", "rollout-1"]


def test_what_is_begun_anew_goes_to_a_server_whose_version_is_new_enough_or_the_newest() -> None:
    routing = new_routing(1, 0)
    train_a_step(routing)
    accept(routing, 2)
    assert routing.may_redo(1) and not routing.may_redo(0)
    del routing.roster.members["rollout-0"]
    assert routing.may_redo(0), "nothing better is to be had"


def test_a_late_report_of_an_older_push_does_not_take_a_version_back() -> None:
    roster = new_routing(None).roster
    member = roster.members["rollout-0"]

    def report(version: int, incarnation: int) -> tuple[int, bool]:
        committed = ["rollout-0", "gone"]
        roster.bring_up(protos.PushReport(policy_version=version, incarnation=incarnation, committed=committed))
        return member.policy_version, member.has_version

    assert report(7, 1) == (7, True)
    assert report(6, 1) == (7, True)
    assert report(5, 2) == (5, True), "another trainer has gone back to its checkpoint"
