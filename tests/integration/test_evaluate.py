"""`offbeat eval` on the tiny model: real engine, real reward workers, files that can be counted over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from services.cli import app
from services.evaluation.verdicts import pass_at_k

REWARD = """
def even(item):
    if item.response.startswith("1"):
        raise RuntimeError("no ones")
    return {"score": float(len(item.response) % 2 == 0), "answer": item.response[:1]}
"""
ROWS = [{"prompt": text, "ground_truth": "5"} for text in ("1+4=", "2+3=", "5+0=")]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


class Evaluated:
    """What the command said, and what it wrote."""

    def __init__(self, folder: Path, *words: str) -> None:
        out, summary = folder / "samples.jsonl", folder / "summary.json"
        command = ["eval", *words, "--out", str(out), "--summary", str(summary)]
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        self.code, self.errors = done.exit_code, done.stderr
        self.told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
        self.samples = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        self.summary = json.loads(summary.read_text()) if summary.exists() else None

    def texts(self) -> list[str]:
        return [sample["response"] for sample in self.samples]


def on_file(folder: Path, data: Path, model: Path, *words: str) -> Evaluated:
    reward = f"{data.parent / 'reward.py'}:even"
    return Evaluated(folder, "--model", str(model), "--data", str(data), "--reward", reward, *words)


def test_figures_follow_from_the_file_of_samples(tmp_path: Path, data: Path, model_folder: Path) -> None:
    found = on_file(tmp_path, data, model_folder, "--k", "1,2,4", "--samples-per-prompt", "6", "--max-tokens", "3")
    assert found.code == 0, found.errors
    assert found.summary == found.told and found.told["num_prompts"] == 3 and found.told["samples_per_prompt"] == 6
    assert [(sample["prompt"], sample["index"]) for sample in found.samples] == [
        (row["prompt"], index) for row in ROWS for index in range(6)
    ]
    by_prompt = [[one for one in found.samples if one["prompt"] == row["prompt"]] for row in ROWS]
    judged = [[one for one in samples if one["failure"] is None] for samples in by_prompt]
    assert all(len(samples) >= 4 for samples in judged), "so that every figure is over all three prompts"
    for k in (1, 2, 4):
        each = [pass_at_k(len(samples), sum(one["correct"] for one in samples), k) for samples in judged]
        assert found.told[f"pass@{k}"] == pytest.approx(sum(each) / 3, abs=1e-6)
    assert all(one["reward"] == float(len(one["response"]) % 2 == 0) for samples in judged for one in samples)
    assert all(one["answer"] == one["response"][:1] for samples in judged for one in samples)


def test_a_reward_that_fails_is_counted_and_told_and_is_no_zero(tmp_path: Path, data: Path, model_folder: Path) -> None:
    found = on_file(tmp_path, data, model_folder, "--samples-per-prompt", "16", "--max-tokens", "2")
    failed = [one for one in found.samples if one["failure"]]
    assert failed and found.told["failures"] == {"reward_error": len(failed)}
    assert all(one["response"].startswith("1") and one["reward"] is None for one in failed)
    assert f"{len(failed)} of 48 samples have no verdict" in found.errors and "no ones" in found.errors
    judged = [one["reward"] for one in found.samples if not one["failure"]]
    assert found.told["mean_reward"] == pytest.approx(sum(judged) / len(judged), abs=1e-6)


def test_a_seed_gives_the_same_samples_and_another_one_others(tmp_path: Path, data: Path, model_folder: Path) -> None:
    words = ("--samples-per-prompt", "8", "--temperature", "1", "--max-tokens", "4")
    first, again, other = (
        on_file(tmp_path, data, model_folder, *words, "--seed", seed).texts() for seed in ("1", "1", "2")
    )
    assert first == again and first != other and len(set(first)) > 3


def test_one_sample_is_greedy_and_the_same_for_every_seed(tmp_path: Path, data: Path, model_folder: Path) -> None:
    first, other = (on_file(tmp_path, data, model_folder, "--seed", seed) for seed in ("1", "2"))
    assert first.told["temperature"] == 0.0 and first.texts() == other.texts()


def test_a_prompt_without_room_is_a_failure_of_its_own(tmp_path: Path, data: Path, model_folder: Path) -> None:
    data.write_text(data.read_text() + json.dumps({"prompt": "1" * 200, "ground_truth": "5"}) + "\n")
    found = on_file(tmp_path, data, model_folder)
    assert found.code == 0 and found.told["failures"]["unfit_prompt"] == 1
    assert found.samples[3]["response"] is None and found.samples[3]["failure"].startswith("unfit_prompt: ")


def test_where_every_sample_fails_there_is_no_figure_and_the_exit_code_says_so(
    tmp_path: Path, data: Path, model_folder: Path
) -> None:
    (tmp_path / "reward.py").write_text("def even(item):\n    return float('nan')\n")
    found = on_file(tmp_path, data, model_folder)
    assert found.code == 1 and "pass@1" not in found.told and found.told["failures"] == {"reward_invalid_value": 3}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--k", "2", "--samples-per-prompt", "1"), "only 1 samples are drawn"),
        (("--k", "1,x"), "write numbers from 1 on"),
        (("--k", "4", "--temperature", "0"), "draws one sample again and again"),
        (("--split", "tset"), "there are train and test"),
        (("--engine", "hff"), "rollout.engine"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, data: Path, model_folder: Path, words: tuple[str, ...], told: str
) -> None:
    found = on_file(tmp_path, data, model_folder, *words)
    assert found.code in (1, 2) and told in found.errors


def test_a_file_needs_a_reward_and_a_model_must_be_there(tmp_path: Path, data: Path, model_folder: Path) -> None:
    assert "--data without --reward" in Evaluated(tmp_path, "--model", str(model_folder), "--data", str(data)).errors
    assert "no such folder" in Evaluated(tmp_path, "--model", str(tmp_path / "nowhere")).errors
    assert "no whole checkpoint" in Evaluated(tmp_path, "--model", str(tmp_path)).errors


def test_a_recipe_gives_data_and_reward_and_a_file_takes_the_place_of_the_data(
    tmp_path: Path, data: Path, model_folder: Path
) -> None:
    recipe = {
        "model": str(model_folder),
        "run": {"name": "t", "num_steps": 1},
        "data": {"type": "arithmetic", "digits": 1},
        "rollout": {"max_model_len": 32, "threads": 1, "sampling": {"max_tokens": 2}},
        "reward": {"functions": [{"target": "arithmetic"}]},
        "evaluation": {"every_steps": 5, "data": {"type": "arithmetic", "digits": 2}},
    }
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(recipe))
    found = Evaluated(tmp_path, "--model", str(model_folder), "--recipe", str(path), "--num-prompts", "5")
    assert found.code == 0 and found.told["num_prompts"] == 5 and found.told["max_tokens"] == 2
    assert all(sample["prompt_id"].startswith("arithmetic/test/") for sample in found.samples)
    assert {len(sample["prompt"]) for sample in found.samples} == {6}, "what the run is evaluated on comes first"
    found = Evaluated(tmp_path, "--model", str(model_folder), "--recipe", str(path), "--data", str(data))
    assert [sample["prompt"] for sample in found.samples] == [row["prompt"] for row in ROWS]
