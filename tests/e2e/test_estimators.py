"""Whole runs with advantage estimators that ask the loop for more than a reward."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.conftest import StartRun
from tests.e2e.kit import REWARDS, assert_effectively_once

STEPS = 3
SHORT = (f"run.num_steps={STEPS}", "launch.rollout_servers=1")


def test_gdpo_learns_from_the_parts_that_the_reward_service_gave(start: StartRun) -> None:
    run = start(
        *SHORT,
        "trainer.algorithm.adv_estimator=gdpo",
        "trainer.algorithm.gdpo_weights={digits: 1, length: 0.5}",
        f"reward.functions=[{{target: '{REWARDS}:digits'}}, {{target: length, weight: 0}}]",
    )
    run.wait()
    assert_effectively_once(run, steps=STEPS)
    for row, batch in zip(run.rows("metrics"), run.batches(), strict=True):
        for name in ("digits", "length"):
            parts = [trajectory.reward_breakdown[name] for trajectory in batch.trajectories]
            assert row[f"reward_mean/{name}"] == pytest.approx(np.mean(parts), abs=1e-6)
        assert row["updates"] == 1 and row["grad_norm"] > 0


def test_a_token_baseline_computes_every_sample_before_it_learns(start: StartRun) -> None:
    run = start(*SHORT, "trainer.algorithm.adv_estimator=optimal_token_baseline")
    run.wait()
    assert_effectively_once(run, steps=STEPS)
    for row in run.rows("metrics"):
        assert row["samples_computed"] == row["samples"]
        assert row["updates"] == 1 and row["grad_norm"] > 0
