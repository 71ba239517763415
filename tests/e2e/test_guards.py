"""Guards in whole runs: updates that are not finite end a run loudly, and alarms are told once."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.errors import RunStopped
from tests.e2e.conftest import StartRun
from tests.e2e.kit import BATCH, make_run, write_recipe
from tests.e2e.test_commands import offbeat

USER_CODE = Path(__file__).with_name("user_code.py")
BREAKS = (f"trainer.algorithm.loss={USER_CODE}:not_a_number", "trainer.algorithm.adv_estimator=reinforce")
SHORT = ("run.num_steps=6", "launch.rollout_servers=1")


def test_a_run_whose_updates_are_not_finite_ends_with_the_sentence_and_exit_code_1(tmp_path: Path, model: Path) -> None:
    overrides = (*BREAKS, *SHORT, "trainer.guards.max_skips_in_a_row=2")
    done = offbeat("train", str(write_recipe(tmp_path, model=model)), *overrides, "--plain", seconds=90.0)
    run = make_run(tmp_path, *overrides, model=model)
    assert done.returncode == 1, done.stdout
    sentence = (
        "stopped at step 2: 2 updates in a row were left out (trainer.guards.max_skips_in_a_row=2): of the last one the"
        " loss is nan, in the micro-batches of samples "
    )
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert run.summary()["stopped"].startswith(sentence) and run.summary()["steps"] == 2
    skipped = run.events("skipped", "trainer")
    assert [event["step"] for event in skipped] == ["1", "2"]
    for event, batch in zip(skipped, run.batches(), strict=False):
        keys = {f"{group}/{index}" for group, index in batch.keys}
        assert len(keys) == BATCH and set(event["samples"].split(",")) == keys
        assert set(event["suspects"].split(",")) <= keys and event["why"] == "loss is nan"
    assert [event["step"] for event in run.events("stopped", "conductor")] == ["2"]
    assert [(row["updates"], row["skipped"]) for row in run.rows("metrics")] == [(0, 1), (0, 1)]
    assert "starting it again" not in done.stderr


def test_the_count_in_a_row_outlives_the_trainer_that_began_it(start: StartRun) -> None:
    every = ("trainer.checkpoint.every_steps=1", "trainer.guards.max_skips_in_a_row=3", "run.max_staleness=0")
    run = start(*BREAKS, *SHORT, *every, faults="trainer:step.computed@3=kill")
    with pytest.raises(RunStopped, match="stopped at step 3: 3 updates in a row"):
        run.wait()
    assert run.fired() == ["trainer:step.computed@3=kill"] and run.launcher.restarts == 1


def test_alarms_are_told_when_they_begin_and_counted_while_they_last(tmp_path: Path, model: Path) -> None:
    guards = "trainer.guards={grad_norm_above: 1.0e-9, entropy_below: 100, logprob_diff_above: 100}"
    run = make_run(tmp_path, *SHORT, "run.num_steps=3", guards, model=model).inline()
    told = [(event["step"], event["alarm"], event["threshold"]) for event in run.events("warning", "trainer")]
    assert told == [("1", "grad_norm_above", "1e-09"), ("1", "entropy_below", "100")]
    assert [row["alarms"] for row in run.rows("metrics")] == [2, 2, 2]
    assert "stopped" not in run.summary()


def test_an_alarm_ends_the_run_where_it_shall(tmp_path: Path, model: Path) -> None:
    guards = "trainer.guards={entropy_below: 100, stop_on_alarm: true}"
    run = make_run(tmp_path, *SHORT, guards, model=model)
    with pytest.raises(RunStopped, match=r"stopped at step 1: a figure is out of bounds .*entropy_below=100"):
        run.inline()
    assert run.summary()["steps"] == 1
