"""Whole runs of two steps with every advantage estimator: the gradient is that of its advantages, computed again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import protos
from protos.arrays import from_array
from services.records.book import Batch
from tests.e2e.conftest import StartRun
from tests.e2e.kit import BATCH, PROMPTS, REWARDS, Run, assert_effectively_once, make_run
from tests.e2e.plain_grpo import loss_of, next_logprobs, over_greedy, train
from tests.e2e.plain_inputs import inputs_of
from trainer.advantages import ESTIMATORS, AdvantageOptions

STEPS = 2
SYNCHRONOUS = (f"run.num_steps={STEPS}", "run.max_staleness=0", "launch.rollout_servers=1")
NEEDS = {
    "gdpo": (
        "trainer.algorithm.gdpo_weights={digits: 1, length: 0.5}",
        f"reward.functions=[{{target: '{REWARDS}:digits'}}, {{target: length, weight: 0}}]",
    ),
}
PARTS = ("digits", "length")
MORE_SERVICES = ("gae", "distillation")
"""These are tested beside what they learn from."""
RunOf = Callable[[str], Run]
WITH_BASELINES = STEPS * (BATCH + PROMPTS)


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory, model: Path) -> RunOf:
    """The synchronous run with an estimator, from start to end in this process; once for all tests."""

    @cache
    def run_inline(estimator: str) -> Run:
        overrides = (*SYNCHRONOUS, f"trainer.algorithm.adv_estimator={estimator}", *NEEDS.get(estimator, ()))
        return make_run(tmp_path_factory.mktemp(estimator), *overrides, model=model).inline()

    return run_inline


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("gae", "distillation")])
def test_a_run_with_every_estimator(inline: RunOf, model: Path, name: str) -> None:
    run = inline(name)
    assert_effectively_once(run, steps=STEPS, samples=WITH_BASELINES if name == "remax" else None)
    rows = run.rows("metrics")
    for row in rows:
        assert row["updates"] == 1 and row["skipped"] == 0 and row["samples"] == row["num_samples"] == BATCH
    assert rows[0]["grad_norm"] == pytest.approx(gradient_norm(model, run.batches()[0], name), rel=1e-4)


def gradient_norm(model_folder: Path, batch: Batch, name: str) -> float:
    """Of the first step, by one sample after the other."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    def estimate(trajectories: list[protos.Trajectory]) -> list[Tensor]:
        parts = PARTS if name == "gdpo" else ()
        inputs = inputs_of(model, trajectories, parts)
        found = ESTIMATORS[name](inputs, AdvantageOptions(part_weights=(1.0, 0.5) if parts else ()))
        lengths = inputs.mask_BR.sum(-1).int().tolist()
        return [row[:length] for row, length in zip(found.advantages_BR, lengths, strict=True)]

    loss_of(model, batch.trajectories, estimate).backward()  # type: ignore[no-untyped-call]
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf))


def test_gdpo_tells_the_parts_that_the_reward_service_gave(inline: RunOf) -> None:
    run = inline("gdpo")
    for row, batch in zip(run.rows("metrics"), run.batches(), strict=True):
        for name in PARTS:
            parts = [trajectory.reward_breakdown[name] for trajectory in batch.trajectories]
            assert row[f"reward_mean/{name}"] == pytest.approx(np.mean(parts), abs=1e-6)


def test_a_token_baseline_computes_every_sample_before_it_learns(inline: RunOf) -> None:
    for row in inline("optimal_token_baseline").rows("metrics"):
        assert row["samples_computed"] == row["samples"]


# ReMax: a greedy sample beside each group.


def test_remax_learns_what_a_plain_loop_learns_from_rewards_less_the_greedy_one(inline: RunOf, model: Path) -> None:
    torch.set_num_threads(1)
    run = inline("remax")
    optimizer = run.config.trainer.optimizer
    losses, weights = train(model, run.batches(), lr=optimizer.lr, decay=optimizer.weight_decay, estimate=over_greedy)
    assert [row["loss"] for row in run.rows("metrics")] == pytest.approx(losses, abs=1e-5)
    for name, tensor in load_file(run.checkpoint(STEPS) / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[name], rtol=0.0, atol=1e-5)


def test_remax_draws_one_greedy_sample_a_group_and_counts_it_nowhere_else(inline: RunOf, model: Path) -> None:
    run = inline("remax")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row, batch in zip(run.rows("metrics"), run.batches(), strict=True):
        greedy = [sample for sample in batch.trajectories if sample.baseline]
        drawn = [sample for sample in batch.trajectories if not sample.baseline]
        assert [key for key, sample in zip(batch.keys, batch.trajectories, strict=True) if sample.baseline] == [
            (group, run.config.run.group_size) for group in sorted({group for group, _ in batch.keys})
        ]
        assert row["baseline_reward_mean"] == pytest.approx(np.mean([sample.reward for sample in greedy]), abs=1e-5)
        assert row["reward_mean"] == pytest.approx(np.mean([sample.reward for sample in drawn]), abs=1e-5)
        assert row["tokens"] == sum(sample.response_ids.shape[0] for sample in drawn)
        assert {span.policy_version for sample in greedy for span in sample.spans} == {batch.step - 1}
    for sample in (sample for sample in run.batches()[0].trajectories if sample.baseline):
        with torch.no_grad():
            best_R = next_logprobs(plain, sample).max(-1)
        assert best_R.indices.tolist() == from_array(sample.response_ids).tolist()
        assert best_R.values.tolist() == pytest.approx(from_array(sample.behaviour_logprobs).tolist(), abs=1e-4)


def test_remax_goes_on_after_a_crash_as_if_nothing_had_been(start: StartRun, inline: RunOf) -> None:
    """A trainer that dies with a computed step takes the batch, baselines and all, from the ledger again."""
    undisturbed = inline("remax")
    run = start(*SYNCHRONOUS, "trainer.algorithm.adv_estimator=remax", faults="trainer:step.computed@2=kill")
    run.wait()
    assert run.fired() == ["trainer:step.computed@2=kill"]
    assert_effectively_once(run, steps=STEPS, samples=WITH_BASELINES)
    assert {step: set(found) for step, found in run.hashes().items()} == {
        step: set(found) for step, found in undisturbed.hashes().items()
    }
