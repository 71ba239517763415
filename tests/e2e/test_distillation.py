"""On-policy distillation as its recipe has it: two models made on the spot, a teacher that is served, a falling KL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protos.arrays import from_array
from services.compose import load_config
from tests.e2e.kit import Run, assert_effectively_once


@pytest.mark.slow
def test_the_student_of_the_recipe_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    config = load_config("distill_tiny", [f"run.folder={tmp_path}"])
    run = Run(config, config.run_folder, tmp_path / "faults.log").inline()
    assert (run.folder / "model" / "config.json").is_file() and (run.folder / "teacher" / "config.json").is_file()
    steps, samples = config.run.num_steps, config.run.num_steps * config.run.prompts_per_step * config.run.group_size
    assert_effectively_once(run, steps=steps, samples=samples)
    kls = [row["teacher_kl"] for row in run.rows("metrics")]
    assert 0 < np.mean(kls[-10:]) < 0.5 * np.mean(kls[:5])
    rewards = [row["reward_mean"] for row in run.rows("metrics")]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:5])
    first = run.batches()[0].trajectories  # made by the weights that the step begins with
    student, teacher = (
        np.concatenate([from_array(getattr(one, name)) for one in first])
        for name in ("behaviour_logprobs", "reference_logprobs")
    )
    assert kls[0] == pytest.approx(np.mean(student - teacher), abs=1e-3)
