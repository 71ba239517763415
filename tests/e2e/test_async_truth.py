"""max_staleness 2: the bound holds for every trained sample, and the engine's logprobs are the trainer's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import protos
from protos.arrays import from_array
from tests.e2e.kit import BATCH, Run, assert_effectively_once
from tests.e2e.plain_grpo import response_logprobs


def test_no_trained_sample_is_staler_than_the_bound_and_both_servers_work(asynchronous_run: Run) -> None:
    assert_effectively_once(asynchronous_run, steps=8)
    batches = asynchronous_run.batches()
    ages = [
        batch.step - 1 - span.policy_version
        for batch in batches
        for sample in batch.trajectories
        for span in sample.spans
    ]
    assert min(ages) >= 0 and max(ages) == 2, "the run must use what it is allowed"
    assert {sample.server for batch in batches for sample in batch.trajectories} == {"rollout-0", "rollout-1"}
    counted = asynchronous_run.summary()["staleness"]
    assert sum(counted.values()) == 8 * BATCH and set(counted) <= {"0", "1", "2"}


def test_behaviour_logprobs_are_those_of_the_checkpoint_of_their_version(asynchronous_run: Run, model: Path) -> None:
    torch.set_num_threads(1)
    compared = 0
    for version, samples in by_single_version(asynchronous_run).items():
        folder = asynchronous_run.checkpoint(version) if version else model
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for sample in samples:
            with torch.no_grad():
                expected = response_logprobs(network, sample).numpy()
            np.testing.assert_allclose(from_array(sample.behaviour_logprobs), expected, rtol=0.0, atol=1e-4)
            compared += 1
    assert compared >= 3 * BATCH


def by_single_version(run: Run) -> dict[int, list[protos.Trajectory]]:
    """Version -> the trained samples whose tokens were all made by it."""
    found: dict[int, list[protos.Trajectory]] = {}
    for batch in run.batches():
        for sample in batch.trajectories:
            if len(sample.spans) == 1:
                found.setdefault(sample.spans[0].policy_version, []).append(sample)
    return found
