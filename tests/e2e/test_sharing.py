"""One device in turns: rollout servers sleep while the trainer works, and whoever dies meanwhile holds nobody up."""

from __future__ import annotations

import signal

from tests.e2e.conftest import StartRun
from tests.e2e.kit import Run, assert_effectively_once

STEPS = 8
TURNS = (
    f"run.num_steps={STEPS}",
    "run.max_staleness=0",
    "launch.rollout_servers=1",
    "launch.share_gpu=true",
    "launch.time_sharing=true",
    "trainer.offload=all",
)


def turns(run: Run) -> list[tuple[str, int]]:
    """(what happened, its step) in order; of pushes those of a step."""
    steps = {"sleep": "step", "trained": "step", "push": "policy_version", "wake": "version"}
    rows = [(row["kind"], int(row[steps[row["kind"]]])) for row in run.rows("events") if row["kind"] in steps]
    return [row for row in rows if row != ("push", 0)]


def assert_in_turns(run: Run) -> None:
    """Asleep, trained, pushed, awake: in every step, and no two steps at once."""
    expected = [(what, step) for step in range(1, STEPS + 1) for what in ("sleep", "trained", "push", "wake")]
    found = turns(run)
    assert found[: len(expected) - 1] == expected[:-1]


def test_server_and_trainer_take_turns_in_every_step_and_train_as_ever(start: StartRun, synchronous_run: Run) -> None:
    run = start(*TURNS)
    run.wait()
    assert_effectively_once(run, steps=STEPS)
    assert_in_turns(run)
    assert not run.events("lost")
    for batch in run.batches():
        assert {span.policy_version for one in batch.trajectories for span in one.spans} == {batch.step - 1}
    usual = synchronous_run.hashes()
    assert run.hashes() == {step: usual[step] for step in range(1, STEPS + 1)}, "bit for bit as without turns"


def test_a_server_is_killed_asleep_and_a_new_one_takes_its_place(start: StartRun) -> None:
    fault = "trainer:step.computed@3=stop"
    run = start(*TURNS, "conductor.heartbeat_seconds=2", faults=fault)
    run.wait(lambda: run.fired() == [fault])
    assert turns(run)[-1] == ("sleep", 3)
    run.signal("rollout-0", signal.SIGKILL)
    run.wait(lambda: bool(run.events("lost", "rollout-0")))
    run.signal("trainer", signal.SIGCONT)
    run.wait()
    assert_effectively_once(run, steps=STEPS)
    assert len(run.events("joined", "rollout-0")) >= 2 and not run.events("lost", "trainer")
    assert [row for row in turns(run) if row[0] == "sleep"] == [("sleep", step) for step in range(1, STEPS + 1)]


def test_nobody_waits_for_a_server_that_dies_falling_asleep_or_a_trainer_that_dies_in_its_turn(start: StartRun) -> None:
    faults = ("rollout-0:rollout.slept@2=kill", "trainer:step.computed@4=kill", "rollout-1:push.commit@6=kill")
    run = start(*TURNS, "launch.rollout_servers=2", faults=", ".join(faults))
    run.wait()
    assert set(run.fired()) == set(faults)
    assert_effectively_once(run, steps=STEPS)
    assert run.events("lost", "rollout-0") and run.events("lost", "rollout-1") and run.events("lost", "trainer")
    assert all(len(set(found)) == 1 for found in run.hashes().values()), "what was replayed gave the same weights"


def test_the_conductor_dies_in_both_turns_and_goes_on_with_whose_turn_it_is(start: StartRun) -> None:
    faults = ("conductor:batch.recorded@3=kill", "conductor:leases.sent@2=kill")
    run = start(*TURNS, faults=", ".join(faults))
    run.wait()
    assert set(run.fired()) == set(faults)
    assert_effectively_once(run, steps=STEPS)
    assert len(run.events("recovered")) == 2
    slept = [step for what, step in turns(run) if what == "sleep"]
    assert sorted(set(slept)) == list(range(1, STEPS + 1))
