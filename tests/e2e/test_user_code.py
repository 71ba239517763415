"""Whole runs with an estimator and a loss of the user's own, and with the KL counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.kit import Run, assert_effectively_once, make_run, write_recipe
from tests.e2e.test_commands import offbeat

USER_CODE = Path(__file__).with_name("user_code.py")
STEPS = 2
SYNCHRONOUS = (f"run.num_steps={STEPS}", "run.max_staleness=0", "launch.rollout_servers=1")
PLAIN = ("trainer.algorithm.adv_estimator=reinforce", "trainer.algorithm.loss=vanilla")


def run_of(folder: Path, model: Path, *overrides: str) -> Run:
    folder.mkdir()
    run = make_run(folder, *SYNCHRONOUS, *overrides, model=model).inline()
    assert_effectively_once(run, steps=STEPS)
    return run


def test_functions_in_a_file_take_the_place_of_the_built_in_ones(tmp_path: Path, model: Path) -> None:
    own = f"trainer.algorithm={{adv_estimator: '{USER_CODE}:half_reward', loss: '{USER_CODE}:twice_vanilla'}}"
    found = run_of(tmp_path / "own", model, own)
    plain = run_of(tmp_path / "plain", model, *PLAIN)
    assert [row["users_own"] for row in found.rows("metrics")] == [7, 7]
    for row, expected in zip(found.rows("metrics"), plain.rows("metrics"), strict=True):
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert row["policy_loss"] == pytest.approx(0.5 * expected["policy_loss"], rel=1e-3)


def test_a_kl_that_shall_count_twice_is_in_the_reward_and_in_the_loss(tmp_path: Path, model: Path) -> None:
    both = "trainer.algorithm={kl_use: both, kl_twice: true, kl_coef: 0.3, kl_loss_coef: 0.1, kl_estimator: k2}"
    run = run_of(tmp_path / "both", model, both)
    second = run.rows("metrics")[1]
    assert second["kl_coef"] == 0.3 and second["kl_in_reward"] > 0
    assert second["kl_in_reward"] == pytest.approx(second["kl"], rel=1e-3)
    assert second["kl_loss"] == pytest.approx(0.1 * second["kl"], rel=1e-3)


def test_a_function_that_takes_something_else_ends_the_run_before_it_begins(tmp_path: Path, model: Path) -> None:
    recipe = str(write_recipe(tmp_path, model=model))
    done = offbeat("train", recipe, f"trainer.algorithm.adv_estimator={USER_CODE}:takes_too_little", "--plain")
    assert done.returncode == 1
    assert "takes (inputs: 'AdvantageInputs') -> 'AdvantageOutputs'; write it as (inputs, options)" in done.stderr
    assert "Traceback" not in done.stderr
