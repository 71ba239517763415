"""Whole runs with a critic: what its first step is by hand, and that a crash changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from services.commands.export import export_model
from tests.e2e.conftest import StartRun
from tests.e2e.kit import Run, assert_effectively_once, make_run
from tests.e2e.test_metric_names import documented

STEPS = 3
WITH_CRITIC = (
    *(f"run.num_steps={STEPS}", "run.max_staleness=0", "launch.rollout_servers=1", "trainer.checkpoint.every_steps=1"),
    *("trainer.algorithm.adv_estimator=gae", "trainer.algorithm.gae_lambda=0.9", "trainer.algorithm.gamma=0.95"),
    *("trainer.critic.optimizer.lr=0.001", "trainer.critic.warmup_steps=1", "trainer.critic.minibatches=2"),
)
FIGURES = ("value_loss", "value_mean", "return_mean", "critic_grad_norm")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    return make_run(tmp_path_factory.mktemp("critic"), *WITH_CRITIC, model=model).inline()


def test_the_first_step_is_that_of_a_critic_that_expects_nothing(undisturbed: Run) -> None:
    """All values are 0, so the differences are the rewards, and sums of them the discounted rewards."""
    assert_effectively_once(undisturbed, steps=STEPS)
    first, second, third = undisturbed.rows("metrics")
    samples = undisturbed.batches()[0].trajectories
    returns = np.concatenate(
        [sample.reward * 0.855 ** np.arange(sample.response_ids.shape[0])[::-1] for sample in samples]
    )
    assert first["return_mean"] == pytest.approx(returns.mean(), abs=1e-6)
    assert first["explained_variance"] == pytest.approx(0, abs=1e-6)
    assert [row["critic_updates"] for row in (first, second, third)] == [2, 2, 2]
    assert (first["updates"], first["updates_left_out"]) == (0, 1)
    assert [(row["updates"], row["skipped"]) for row in (second, third)] == [(1, 0), (1, 0)]
    assert second["value_mean"] != 0 and third["value_loss"] > 0


def test_what_a_step_tells_of_its_critic_is_on_the_page(undisturbed: Run) -> None:
    page = documented()
    told = {name for row in undisturbed.rows("metrics") for name in row}
    assert {*FIGURES, "explained_variance", "value_clip_fraction", "critic_lr", "critic_skipped"} - told == set()
    assert [name for name in told if not any(pattern.fullmatch(name) for pattern in page)] == []


def test_the_critic_lies_in_the_checkpoint_and_not_in_an_export(undisturbed: Run, tmp_path: Path) -> None:
    kept = load_file(undisturbed.checkpoint(STEPS) / "critic-model.safetensors")
    assert kept["head.weight"].any()
    assert export_model(undisturbed.folder, tmp_path / "out") == 0
    assert {file.name for file in (tmp_path / "out").glob("*.safetensors")} == {"model.safetensors"}


def test_a_critic_goes_on_after_a_crash_as_if_nothing_had_been(start: StartRun, undisturbed: Run) -> None:
    run = start(*WITH_CRITIC, faults="trainer:step.computed@3=kill")
    run.wait()
    assert run.fired() == ["trainer:step.computed@3=kill"]
    assert_effectively_once(run, steps=STEPS)
    assert {step: set(found) for step, found in run.hashes().items()} == {
        step: set(found) for step, found in undisturbed.hashes().items()
    }
    told = [[row[name] for name in FIGURES] for row in run.rows("metrics") if row["step"] == STEPS]
    assert told[-1] == [undisturbed.rows("metrics")[-1][name] for name in FIGURES]
