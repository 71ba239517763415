"""The bare baseline: its numbers by hand, and a whole short run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deploy.recipes.plain_loop import Batch, group_advantages, learning_rate_share, policy_loss
from trainer.small.tiny import make_tiny_qwen3

ROOT = Path(__file__).parents[3]


def test_advantages_are_centred_and_scaled_within_each_group() -> None:
    advantages_B = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]), samples=4)
    # group 1: mean 0.5, unbiased variance 4 * 0.25 / 3, so 0.5 / 0.57735 = 0.86603; group 2: no difference
    assert advantages_B.tolist() == pytest.approx([0.86602, -0.86602, -0.86602, 0.86602, 0, 0, 0, 0], abs=1e-4)


def test_the_loss_clips_the_ratio_and_leaves_masked_tokens_out() -> None:
    batch = Batch(
        tokens_BT=torch.zeros(2, 3, dtype=torch.long),
        prompt_length=1,
        behaviour_logprobs_BT=torch.zeros(2, 2),
        mask_BT=torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        advantages_B=torch.tensor([1.0, -1.0]),
    )
    ratios_BT = torch.tensor([[2.0, 1.1], [0.5, 9.0]])
    # min(2, 1.3) + 1.1 - max(0.5, 0.8), over three tokens
    assert policy_loss(ratios_BT.log(), batch).item() == pytest.approx(-(1.3 + 1.1 - 0.8) / 3)


def test_the_learning_rate_rises_for_ten_steps_and_falls_to_the_end() -> None:
    shares = [learning_rate_share(step, steps=100) for step in (0, 4, 20, 60, 100)]
    assert shares == pytest.approx([0.1, 0.5, 0.81, 0.43, 0.05])


@pytest.mark.parametrize("staleness", ["0", "2"])
def test_a_short_run_prints_and_writes_one_json_line(tmp_path: Path, staleness: str) -> None:
    model, out = make_tiny_qwen3(tmp_path / "model"), tmp_path / "line.json"
    flags = f"--steps 3 --prompts 2 --samples 2 --snapshot-every 2 --threads 1 --staleness {staleness}".split()
    done = subprocess.run(
        [sys.executable, "-m", "deploy.recipes.plain_loop", "--model", str(model), "--out", str(out), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    line = json.loads(done.stdout)
    assert line == json.loads(out.read_text())
    assert [point["step"] for point in line["curve"]] == [0, 2, 3]
    assert line["steps"] == 3 and line["wall_seconds"] > 0 and line["samples_per_second"] > 0
    assert line["seconds_to_85"] is None
