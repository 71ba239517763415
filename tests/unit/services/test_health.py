"""Which server is taken out of rotation for its logprobs, by figures that are worked out by hand."""

from typing import Any

import pytest

import protos
from services.records.book import Batch
from services.roster import Roster
from services.stages.health import Health, figures, means

FRESH, OLD = 0, 1
LIMIT = 0.1


def cell(server: str, staleness: int, mean: float, num_tokens: int = 10) -> protos.ServerMismatch:
    return protos.ServerMismatch(server=server, staleness=staleness, num_tokens=num_tokens, mean=mean)


def new_health(*names: str, limit: float | None = LIMIT, patience: int = 2) -> Health:
    roster = Roster(heartbeat_seconds=1.0)
    for name in names:
        join(roster, name, process_id=name)
    return Health(roster, limit=limit, patience=patience)


def join(roster: Roster, name: str, *, process_id: str, first_lease: int = 0) -> None:
    identity = protos.Identity(name=name, role="rollout")
    roster.join(protos.JoinRequest(identity=identity, process_id=process_id), now=0.0).first_lease = first_lease


def judged(health: Health, step: int, *cells: protos.ServerMismatch, lease_id: int = 5) -> list[str]:
    names = {cell.server for cell in cells}
    batch = Batch(step, [], [protos.Trajectory(server=name, lease_id=lease_id) for name in names])
    return list(health.judge(protos.StepReport(step=step, mismatches=cells), batch))


def test_samples_of_the_trainer_s_own_version_are_measured_alone_and_exactly() -> None:
    cells = [cell("a", FRESH, 0.2, 30), cell("a", OLD, 9.0, 10), cell("b", OLD, 0.5)]
    assert str(figures(cells)["a"]) == "0.2 nats a token over 30 tokens, on the trainer's own version"
    assert means(cells) == {"a": (0.2, 30), "b": (0.5, 10)}


def test_older_samples_count_only_above_the_best_server_on_samples_as_old() -> None:
    cells = [cell("a", 1, 0.3, 30), cell("b", 1, 0.1, 10), cell("a", 2, 0.6, 10), cell("b", 2, 0.7, 10)]
    found = figures(cells)
    assert found["a"].nats == pytest.approx((30 * 0.2 + 10 * 0.0) / 40)
    assert found["b"].nats == pytest.approx((10 * 0.0 + 10 * 0.1) / 20)
    assert (found["a"].num_tokens, found["b"].num_tokens) == (40, 20)
    assert means(cells)["a"] == pytest.approx(((30 * 0.3 + 10 * 0.6) / 40, 40))


def test_a_server_with_older_samples_and_none_beside_it_is_not_judged() -> None:
    assert figures([cell("a", 1, 5.0), cell("b", 2, 5.0)]) == {}
    assert figures([cell("a", FRESH, float("nan"))]) == {}


def test_a_server_goes_after_so_many_steps_in_a_row_and_one_that_recovers_stays() -> None:
    health = new_health("a", "b")
    assert judged(health, 1, cell("a", FRESH, 0.2), cell("b", FRESH, 0.2)) == []
    assert judged(health, 2, cell("a", FRESH, 0.2), cell("b", FRESH, 0.1)) == ["a"]
    assert judged(health, 3, cell("b", FRESH, 0.2)) == []
    assert judged(health, 4, cell("b", FRESH, 0.2)) == ["b"]


def test_the_movement_of_the_policy_is_held_against_nobody() -> None:
    health = new_health("a", "b", patience=1)
    assert judged(health, 1, cell("a", OLD, 1.0), cell("b", OLD, 1.05)) == []
    assert judged(health, 2, cell("a", OLD, 1.0), cell("b", OLD, 1.2)) == ["b"]


def test_a_step_that_comes_again_says_nothing_new() -> None:
    health = new_health("a")
    for step in (1, 1, 1):
        assert judged(health, step, cell("a", FRESH, 0.2)) == []
    assert judged(health, 2, cell("a", FRESH, 0.2)) == ["a"]


def test_samples_of_the_process_before_are_not_held_against_the_one_that_took_its_place() -> None:
    health = new_health("a", patience=1)
    join(health.roster, "a", process_id="new", first_lease=100)
    assert judged(health, 1, cell("a", FRESH, 0.2), lease_id=99) == []
    assert judged(health, 2, cell("a", FRESH, 0.2), lease_id=101) == ["a"]


def test_an_evicted_process_stays_out_when_it_joins_again_and_a_new_one_may_come() -> None:
    health = new_health("a", patience=1)
    roster = health.roster
    assert judged(health, 1, cell("a", FRESH, 0.2)) == ["a"]
    roster.evict("a", "why")
    assert judged(health, 2, cell("a", FRESH, 0.2)) == [], "once is enough"
    join(roster, "a", process_id="a")
    assert roster.members["a"].evicted == "why" and list(roster.of("rollout")) == []
    join(roster, "a", process_id="new")
    assert roster.members["a"].evicted == "" and [member.name for member in roster.of("rollout")] == ["a"]


@pytest.mark.parametrize("limit", [None, 0.1])
def test_the_figures_are_noted_whether_or_not_there_is_a_limit(limit: float | None) -> None:
    health: Any = new_health("a", limit=limit)
    assert judged(health, 1, cell("a", FRESH, 0.25), cell("gone", FRESH, 9.0)) == []
    assert health.roster.members["a"].logprob_diff_mean == 0.25
