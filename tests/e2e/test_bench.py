"""The benches of GPUs at a tiny size on a CPU, as they are typed: real services, real baselines, JSON out."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli import app
from trainer.small.shapes import make_shape

SMALL = ["rollout.threads=1", "trainer.threads=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where benches lie, with the tiny shape made."""
    found = tmp_path_factory.mktemp("bench")
    make_shape("tiny", found / "models" / "tiny-float32", dtype="float32")
    return found


def bench(folder: Path, *words: str) -> dict[str, Any]:
    out = folder / "out.json"
    done = CliRunner().invoke(app, ["bench", *words, "--folder", str(folder), "--out", str(out), *SMALL])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_generation_through_the_service_stands_beside_the_bare_engine(folder: Path) -> None:
    flags = ["--samples", "16", "--group-size", "4", "--prompt-tokens", "7", "--response-tokens", "9", "--rounds", "2"]
    found = bench(folder, "rollout", "--engine", "hf", "--shape", "tiny", *flags)
    ours, bare = found["service"]["tokens_per_s"], found["bare"]["tokens_per_s"]
    assert "engine:hf" in found["service"]["capabilities"]
    for way in ("logprobs", "no_logprobs"):
        assert found[f"service_over_bare_{way}"] == pytest.approx(ours["median"] / bare[way]["median"], abs=1e-3)
    assert found["work"]["samples"] == 16 and found["machine"]["torch"]


def test_pushes_are_timed_idle_and_while_decoding_and_verified(folder: Path) -> None:
    flags = ["--rounds", "3", "--decoding", "8", "--response-tokens", "40", "--pause-seconds", "0.01"]
    found = bench(folder, "push", "--engine", "hf", "--shape", "tiny", *flags)
    assert found["num_bytes"] == 427_776  # 106,944 parameters of float32
    assert found["verified_version"] == 2 + 3 + 3
    assert found["decoding"]["in_hand"] == 8
    for half in ("idle", "decoding"):
        parts = found[half]
        assert (parts["transport"], parts["pushes"]) == ("gloo", 3)
        assert 0 < parts["begin_ms"]["min"] < parts["push_ms"]["min"] and parts["pack_ms"]["min"] > 0
        assert 0 < parts["stall_ms"]["max"] < parts["push_ms"]["max"]
    assert found["bare_broadcast"]["kind"] == "gloo" and found["bare_broadcast"]["ms"]["min"] > 0


def test_the_loop_is_measured_on_any_recipe(folder: Path) -> None:
    flags = ["--shape", "tiny", "--modes", "async", "--steps", "4", "--warm-steps", "1", "--rounds", "1"]
    work = ["run.prompts_per_step=2", "run.group_size=4", "data.prompt_tokens=7", "data.response_mean=5"]
    work += ["data.response_max=12", "rollout.engine=hf", "rollout.max_num_seqs=16", "push.transport=auto"]
    found = bench(folder, "loop", "--recipe", "bench_loop", *flags, *work)
    figures = found["async"]
    assert figures["samples_per_s"]["median"] > 0 and figures["push_p50_ms"]["median"] > 0
    assert figures["train_tokens_per_s"]["median"] > figures["tokens_per_s"]["median"], "prompts are trained on too"
    assert figures["logprob_diff_mean"]["median"] < 1e-4
    summary = json.loads((folder / "loop-async" / "summary.json").read_text())
    assert summary["ledger"]["balanced"] and summary["samples"] == 4 * 8


def test_a_mistake_is_told_before_anything_starts(folder: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "loop", "--steps", "3", "--warm-steps", "3"])
    assert done.exit_code == 2 and "leaves nothing" in done.output
    done = CliRunner().invoke(app, ["bench", "push", "--engine", "vlm", "--folder", str(folder)])
    assert done.exit_code == 2 and "there are hf, vllm, sglang" in done.output
