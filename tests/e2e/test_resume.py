"""A killed trainer resumes from its checkpoint and is fed the recorded batches: the lost weights come again."""

from __future__ import annotations

import pytest

from services.errors import OffbeatError
from tests.e2e.conftest import SYNCHRONOUS, StartRun
from tests.e2e.kit import Run, assert_effectively_once, flip_byte

WEIGHTS, MOMENTS = "model.safetensors", "optimizer.safetensors"


def test_a_synchronous_run_whose_trainer_dies_twice_ends_exactly_as_an_undisturbed_one(
    start: StartRun, synchronous_run: Run
) -> None:
    faults = "trainer:step.computed@3=kill, trainer:push.done@7=kill"
    run = start(*SYNCHRONOUS, faults=faults)
    run.wait()
    assert run.fired() == faults.split(", ")
    assert_effectively_once(run, steps=10)
    assert_replays_agree(run, reported_twice={7}, replayed={3, 7})
    assert {step: hashes[-1] for step, hashes in run.hashes().items()} == {
        step: hashes[-1] for step, hashes in synchronous_run.hashes().items()
    }
    for name in (WEIGHTS, MOMENTS):
        assert (run.checkpoint(10) / name).read_bytes() == (synchronous_run.checkpoint(10) / name).read_bytes()


def test_an_asynchronous_run_replays_lost_steps_to_the_same_weights(start: StartRun) -> None:
    faults = "trainer:checkpoint.write@4=kill, trainer:push.done@7=kill"
    run = start("run.num_steps=8", "conductor.keep_payload_steps=0", faults=faults)
    run.wait()
    assert run.fired() == faults.split(", ")
    assert_effectively_once(run, steps=8)
    assert_replays_agree(run, reported_twice={3, 7}, replayed={3, 4, 7})


def test_a_torn_newest_checkpoint_falls_back_one_and_nothing_is_lost(start: StartRun) -> None:
    run = start(
        "run.num_steps=8", "conductor.keep_payload_steps=0", "launch.max_restarts=0", faults="trainer:push.done@7=kill"
    )
    with pytest.raises(OffbeatError, match="trainer died"):
        run.wait()
    run.stop()
    newest = (run.folder / "checkpoints" / "latest").read_text()
    flip_byte(run.folder / "checkpoints" / newest / WEIGHTS)
    run.start().wait()
    assert f"{newest}/{WEIGHTS}" in run.log("trainer") and "a checkpoint is damaged" in run.log("trainer")
    assert_effectively_once(run, steps=8)
    lost = int(newest.removeprefix("step_"))
    assert_replays_agree(run, reported_twice={lost, 7}, replayed={lost - 1, lost, 7})


def test_a_trainer_that_dies_over_the_last_checkpoint_comes_back_for_it(start: StartRun) -> None:
    faults = "trainer:checkpoint.write@4=kill"
    run = start("run.num_steps=4", "trainer.checkpoint.every_steps=0", faults=faults)
    run.wait()
    assert run.fired() == [faults]
    assert (run.checkpoint(4) / WEIGHTS).is_file()
    assert_effectively_once(run, steps=4)
    assert_replays_agree(run, reported_twice={4}, replayed={1, 2, 3, 4})


def assert_replays_agree(run: Run, *, reported_twice: set[int], replayed: set[int]) -> None:
    """A step that was reported again gave the same weights again, and its report says that it is a replay."""
    hashes = run.hashes()
    assert {step for step, found in hashes.items() if len(found) > 1} >= reported_twice
    assert {step: found for step, found in hashes.items() if len(set(found)) > 1} == {}
    assert {int(row["step"]) for row in run.rows("metrics") if row["replay"]} >= replayed
