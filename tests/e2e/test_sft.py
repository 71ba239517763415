"""Supervised runs, from the command to the last checkpoint: one rank and two, stopped and resumed, a start for RL."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.commands.export import export_model
from services.supervised.command import run_sft
from services.supervised.compose import load_sft_config
from tests.e2e.kit import assert_effectively_once, make_run
from tests.e2e.test_commands import OFFBEAT

STEPS = 6
RECIPE: dict[str, Any] = {
    "run": {"name": "sft"},
    "data": {"type": "arithmetic", "digits": 1},
    "sft": {"num_steps": STEPS, "batch_size": 8, "max_length": 16, "evaluate_every": 3, "num_held_out": 5},
    "trainer": {
        "threads": 1,
        "max_tokens_per_microbatch": 32,
        "optimizer": {"lr": 1.0e-3},
        "checkpoint": {"every_steps": 2},
    },
}
FIGURES = ("loss", "grad_norm", "held_out_loss", "held_out_token_accuracy")


def recipe_file(folder: Path, model: Path) -> str:
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(RECIPE | {"model": str(model)}))
    return str(path)


def sft(folder: Path, model: Path, *overrides: str, code: int = 0) -> Path:
    """A run in this process (of one rank); its folder."""
    folder.mkdir(exist_ok=True)
    config = load_sft_config(recipe_file(folder, model), [f"run.folder={folder}", *overrides])
    assert run_sft(config) == code
    return config.run_folder


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def figures(folder: Path) -> list[float]:
    return [row[name] for row in rows(folder) for name in FIGURES if name in row]


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and moments."""
    checkpoint = folder / "checkpoints" / f"step_{step}"
    files = [load_file(checkpoint / f"{part}.safetensors") for part in ("model", "optimizer")]
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """An undisturbed run on one rank."""
    return sft(tmp_path_factory.mktemp("whole"), model)


def test_a_run_leaves_its_config_figures_and_checkpoints(whole: Path) -> None:
    assert [row["step"] for row in rows(whole)] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows(whole) if "held_out_loss" in row] == [3, 6]
    assert rows(whole)[-1]["held_out_loss"] < rows(whole)[2]["held_out_loss"], "it learns"
    assert json.loads((whole / "summary.json").read_text())["steps"] == STEPS
    assert (whole / "checkpoints" / "latest").read_text() == f"step_{STEPS}"
    assert "step 6/6" in (whole / "logs" / "sft.log").read_text()
    assert load_sft_config(str(whole / "config.yaml")).sft.num_steps == STEPS


def test_a_finished_run_is_not_begun_again(whole: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sft(whole.parent, model, code=1) == whole
    assert "holds a finished run" in capsys.readouterr().err


def test_other_rows_are_refused_on_the_way(whole: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sft(whole.parent, model, "sft.num_steps=8", "data.seed=5", code=2)
    assert "its checkpoints are of other rows" in capsys.readouterr().err


def test_a_guard_stops_the_run_and_says_why(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guards = ["trainer.guards.grad_norm_above=1e-9", "trainer.guards.stop_on_alarm=true"]
    folder = sft(tmp_path, model, *guards, code=1)
    assert [row["alarms"] for row in rows(folder)] == [1.0]
    assert "a figure is out of bounds alarm=grad_norm_above" in (folder / "logs" / "sft.log").read_text()
    assert "trainer.guards.stop_on_alarm is set: grad_norm_above=1e-09" in capsys.readouterr().err


def test_two_ranks_make_the_same_steps_as_one_and_one_goes_on_from_their_shards(
    whole: Path, tmp_path: Path, model: Path
) -> None:
    folder = sft(tmp_path, model, "launch.trainer_ranks=2", "sft.num_steps=4")
    alone = [row["loss"] for row in rows(whole)]
    assert [row["loss"] for row in rows(folder)] == pytest.approx(alone[:4], abs=1e-5)
    assert (folder / "checkpoints" / "step_4" / "rank-1-of-2.model.safetensors").is_file()

    sft(tmp_path, model, f"sft.num_steps={STEPS}")

    assert figures(folder)[-4:] == pytest.approx(figures(whole)[-4:], abs=1e-5)
    assert [row["loss"] for row in rows(folder)] == pytest.approx(alone, abs=1e-5)


def test_a_stopped_run_goes_on_to_the_same_weights_bit_for_bit(tmp_path: Path, model: Path) -> None:
    (tmp_path / "stopped").mkdir()
    long = ["sft.num_steps=150", "sft.evaluate_every=0", "trainer.checkpoint.every_steps=1000"]
    recipe = recipe_file(tmp_path, model)
    command = [*OFFBEAT, "sft", recipe, f"run.folder={tmp_path / 'stopped'}", *long]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics, deadline = tmp_path / "stopped" / "sft" / "metrics.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    _, told = first.communicate(timeout=40)
    assert first.returncode == 1 and "the same command goes on" in told, told
    stopped_at = int(rows(metrics.parent)[-1]["step"])
    assert 1 <= stopped_at < 150 and f"stopped after step {stopped_at};" in told

    resumed, straight = sft(tmp_path / "stopped", model, *long), sft(tmp_path / "straight", model, *long)

    assert figures(resumed) == figures(straight) and len(rows(resumed)) == 150
    found, wanted = state(resumed, 150), state(straight, 150)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_reinforcement_learning_begins_where_supervised_training_ended(whole: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, "run.num_steps=2", model=whole / "checkpoints" / "latest").inline()
    assert_effectively_once(run, steps=2)
    assert run.config.rollout.model == str(whole / "checkpoints" / f"step_{STEPS}")
    assert run.rows("metrics")[0]["logprob_diff_max"] < 1e-4, "the engine begins with the trainer's weights"


def test_with_lora_only_the_adapter_is_trained_and_the_export_is_a_model(tmp_path: Path, model: Path) -> None:
    folder = sft(
        tmp_path, model, "trainer.lora.rank=2", "trainer.optimizer.lr=0.01", "trainer.gradient_checkpointing=true"
    )
    losses = [row["held_out_loss"] for row in rows(folder) if "held_out_loss" in row]
    assert losses[1] < losses[0]
    assert export_model(folder, tmp_path / "merged") == 0
    merged, base = (AutoModelForCausalLM.from_pretrained(one).state_dict() for one in (tmp_path / "merged", model))
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed and all("_proj.weight" in name for name in changed)
