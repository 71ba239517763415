"""max_staleness 0 is plain on-policy GRPO: the same numbers as one page of torch, and the same samples every time."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import SYNCHRONOUS
from tests.e2e.kit import Run, assert_effectively_once, make_run
from tests.e2e.plain_grpo import train


@pytest.fixture(scope="module", params=["snapshot", "streamed"])
def inline_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    """The synchronous run once more, all actors in one process; its weights travel by either way."""
    overrides = (*SYNCHRONOUS, f"push.memory={request.param}")
    run = make_run(tmp_path_factory.mktemp("inline"), *overrides, model=model)
    recipe = run.folder.parents[1] / "recipe.yaml"
    command = [sys.executable, "-P", "-m", "services.cli", "train", str(recipe), *overrides, "--inline"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return run


def test_ten_synchronous_steps_give_the_losses_and_weights_of_a_plain_loop(synchronous_run: Run, model: Path) -> None:
    torch.set_num_threads(1)
    run = synchronous_run
    optimizer = run.config.trainer.optimizer
    losses, weights = train(model, run.batches(), lr=optimizer.lr, decay=optimizer.weight_decay)
    assert [row["loss"] for row in run.rows("metrics")] == pytest.approx(losses, abs=1e-5)
    trained = load_file(run.checkpoint(10) / "model.safetensors")
    start = load_file(model / "model.safetensors")
    assert trained.keys() == weights.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[name], rtol=0.0, atol=1e-5)
    moved = max(float((trained[name] - start[name]).abs().max()) for name in trained)
    assert moved > 5e-4, "the weights must have moved far more than the tolerance"


def test_every_synchronous_sample_was_made_by_the_version_before_its_step(synchronous_run: Run) -> None:
    assert_effectively_once(synchronous_run, steps=10)
    for batch in synchronous_run.batches():
        spans = [(span.policy_version, span.num_tokens) for sample in batch.trajectories for span in sample.spans]
        assert {version for version, _ in spans} == {batch.step - 1}


def test_processes_and_one_process_draw_the_same_samples_bit_for_bit(synchronous_run: Run, inline_run: Run) -> None:
    assert_effectively_once(inline_run, steps=10)
    assert fingerprints(synchronous_run) == fingerprints(inline_run)
    assert synchronous_run.hashes() == inline_run.hashes()


def fingerprints(run: Run) -> list[tuple[int, int, int, str]]:
    """(step, group, index, sha256 over token ids, logprobs and reward) of every trained sample."""
    return [
        (
            batch.step,
            *key,
            digest(sample.response_ids.data, sample.behaviour_logprobs.data, str(sample.reward).encode()),
        )
        for batch in run.batches()
        for key, sample in zip(batch.keys, batch.trajectories, strict=True)
    ]


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"|".join(parts)).hexdigest()
