"""Whole runs of two steps with adapters, pushed merged or alone, held to the start model with no reference service."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from protos.arrays import from_array
from services.commands.export import export_model
from services.commands.lineup import lineup
from tests.e2e.conftest import StartRun
from tests.e2e.kit import Run, assert_effectively_once

STEPS = 2
SHORT = (f"run.num_steps={STEPS}", "run.max_staleness=0", "launch.rollout_servers=1")
LORA = ("trainer.lora.rank=4", "trainer.lora.alpha=64", "trainer.optimizer.lr=1.0e-3")


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    found: torch.Tensor = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
    return found


def furthest(run: Run, folder: Path, *, step: int) -> float:
    """Largest difference in nats between what the servers said of step's samples and what this model says."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (batch,) = [one for one in run.batches() if one.step == step]
    worst = 0.0
    for trajectory in batch.trajectories:
        prompt, response = from_array(trajectory.prompt_ids).tolist(), from_array(trajectory.response_ids).tolist()
        behaviour = torch.from_numpy(from_array(trajectory.behaviour_logprobs).copy())
        worst = max(worst, float((logprobs(model, prompt, response) - behaviour).abs().max()))
    return worst


@pytest.mark.parametrize("push", ["merged", "adapter"])
@pytest.mark.parametrize("kl_use", ["loss", "reward"])
def test_a_run_with_an_adapter(run_inline: StartRun, model: Path, tmp_path: Path, push: str, kl_use: str) -> None:
    algorithm = f"trainer.algorithm={{kl_use: {kl_use}, kl_coef: 0.1, loss: vanilla}}"
    run = run_inline(*SHORT, *LORA, f"trainer.lora.push={push}", algorithm, "trainer.checkpoint.every_steps=1")
    assert not any(post.name.startswith("reference") for post in lineup(run.config))
    assert_effectively_once(run, steps=STEPS)
    first, second = run.rows("metrics")
    name = "kl" if kl_use == "loss" else "kl_in_reward"
    assert first[name] == pytest.approx(0, abs=1e-5), "the first policy is its own reference"
    assert math.isfinite(second[name]) and second[name] != 0
    assert first["grad_norm"] > 0

    saved = load_file(run.checkpoint(1) / "adapter_model.safetensors")
    assert saved and all(".lora_" in key for key in saved)
    assert json.loads((run.checkpoint(1) / "state.json").read_text())["base"]["model"] == str(model)
    out = tmp_path / "exported"
    assert export_model(run.checkpoint(1), out) == 0
    assert furthest(run, out, step=2) < 1e-4
    assert furthest(run, model, step=2) > 1e-3, "the adapter has moved the samples' logprobs"


@pytest.mark.slow
def test_two_trainer_ranks_push_an_adapter_and_go_on_from_its_checkpoint(
    start: StartRun, model: Path, tmp_path: Path
) -> None:
    ranks = ("launch.trainer_ranks=2", "trainer.lora.push=adapter", "trainer.checkpoint.every_steps=1")
    algorithm = "trainer.algorithm={kl_use: loss, kl_coef: 0.1, loss: vanilla}"
    run = start(*SHORT, *LORA, *ranks, algorithm, faults="trainer:step.computed@2=kill")
    run.wait()
    assert run.fired() and run.summary()["steps"] == STEPS
    out = tmp_path / "exported"
    assert export_model(run.checkpoint(1), out) == 0
    assert furthest(run, out, step=2) < 1e-4
