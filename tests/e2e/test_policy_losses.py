"""Whole runs of two steps with every policy loss that is not the default, and an adaptive KL in the reward."""

from __future__ import annotations

import math

import pytest

from tests.e2e.conftest import StartRun
from tests.e2e.kit import assert_effectively_once
from trainer.config import POLICY_LOSSES

STEPS = 2
SHORT = (f"run.num_steps={STEPS}", "launch.rollout_servers=1")
NEEDS = {
    "dro": ("trainer.algorithm.dro_beta=0.1",),
    "clip_cov": ("trainer.algorithm.clip_cov_low=-9", "trainer.algorithm.clip_cov_high=9"),
    "bypass": ("trainer.algorithm.bypass_loss=reinforce", "trainer.algorithm.correction={weights: token}"),
}
METRIC = {"clip_cov": "covariance_fraction", "kl_cov": "covariance_fraction", "bypass": "importance_weight_mean"}


@pytest.mark.parametrize("loss", [name for name in POLICY_LOSSES if name != "decoupled"])
def test_a_run_with_every_policy_loss(run_inline: StartRun, loss: str) -> None:
    run = run_inline(*SHORT, f"trainer.algorithm.loss={loss}", "trainer.algorithm.minibatches=2", *NEEDS.get(loss, ()))
    assert_effectively_once(run, steps=STEPS)
    for row in run.rows("metrics"):
        assert row["updates"] == 2 and row["skipped"] == 0 and row["grad_norm"] > 0
        assert math.isfinite(row["policy_loss"])
        assert row[METRIC.get(loss, "ratio_mean")] > 0


def test_the_coefficient_of_the_kl_in_the_reward_follows_its_target(run_inline: StartRun) -> None:
    algorithm = "{kl_use: reward, kl_coef: 0.1, kl_target: 1.0e+6, kl_horizon: 1000, loss: gspo}"
    run = run_inline(*SHORT, "reference.enabled=true", f"trainer.algorithm={algorithm}")
    assert_effectively_once(run, steps=STEPS)
    first, second = run.rows("metrics")
    assert first["kl_coef"] == 0.1
    assert second["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * first["samples"] / 1000))
