"""Rolling pushes in real runs: versions differ for a while, every sample stays within the bound, and crews may fail."""

from __future__ import annotations

from tests.e2e.conftest import StartRun
from tests.e2e.kit import Run, assert_effectively_once

ROLLING = ("push.mode=rolling", "launch.rollout_servers=3")
SERVERS = {"rollout-0", "rollout-1", "rollout-2"}


def test_no_sample_of_a_run_with_rolling_pushes_is_staler_than_the_bound(start: StartRun) -> None:
    run = start("run.num_steps=10", "run.max_staleness=1", "push.max_version_skew=2", *ROLLING)
    run.wait()
    assert_effectively_once(run, steps=10)
    assert max(ages(run)) <= 1 and min(ages(run)) >= 0
    assert "stale" not in run.summary()["ledger"]["dropped"], "by construction, not by throwing away"
    assert {sample.server for batch in run.batches() for sample in batch.trajectories} == SERVERS
    crews = [event for event in run.events("push") if event["committed"]]
    trained = [event for event in crews if int(event["policy_version"]) > 0]  # those that join together are told as one
    assert all("," not in event["committed"] for event in trained), "one server at a time"
    assert len({event["policy_version"] for event in crews}) >= 10
    last = [event["committed"] for event in crews if event["policy_version"] == 10]
    assert set(last) == SERVERS, "the run ends when all have its last version"
    assert max(skews(run)) <= 2


def test_a_synchronous_run_goes_on_where_a_crew_dies_and_where_the_trainer_dies_between_two_crews(
    start: StartRun,
) -> None:
    faults = ("rollout-1:push.commit@3=kill", "trainer:push.crew@5=kill")
    run = start("run.num_steps=8", "run.max_staleness=0", *ROLLING, faults=", ".join(faults))
    run.wait()
    assert sorted(run.fired()) == sorted(faults)
    assert_effectively_once(run, steps=8)
    assert set(ages(run)) == {0}, "every sample is of the version before its step"
    third = [event for event in run.events("push") if event["policy_version"] == 2]
    assert {"rollout-0", "rollout-2"} <= {event["committed"] for event in third}
    assert all(len(set(found)) == 1 for found in run.hashes().values())


def ages(run: Run) -> list[int]:
    """The trainer's version less each token's, for all trained samples."""
    return [
        batch.step - 1 - span.policy_version
        for batch in run.batches()
        for sample in batch.trajectories
        for span in sample.spans
    ]


def skews(run: Run) -> list[int]:
    """After each push to a crew: how far the oldest server is behind the newest."""
    versions: dict[str, int] = {}
    found = []
    for event in run.events("push"):
        versions.update({name: int(event["policy_version"]) for name in event["committed"].split(",") if name})
        found.append(max(versions.values(), default=0) - min(versions.values(), default=0))
    return found
