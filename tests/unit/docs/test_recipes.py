"""Every recipe passes its check, and the one for an old card is what it says it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli import app
from services.compose import load_config

RECIPES = sorted((Path(__file__).resolve().parents[3] / "deploy" / "recipes").glob("*.yaml"))
PARAMETERS, LAYERS, KEY_VALUE_HEADS, HEAD_WIDTH = 494_032_768, 24, 2, 64
"""Of Qwen2.5-0.5B, as its model card and config.json say."""


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where recipes look for what `offbeat data` makes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    (tmp_path / "data" / "gsm8k" / "train.jsonl").write_text("")


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_recipe_passes_offbeat_check(path: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 0, done.output
    assert done.output.endswith(": fine\n")


def test_the_recipe_for_an_old_card_takes_turns_and_its_sums_are_right() -> None:
    path = next(path for path in RECIPES if path.stem == "single_gpu_24gb")
    config, text = load_config(str(path), []), path.read_text()
    assert config.launch.share_gpu and config.launch.time_sharing and config.trainer.offload == "all"
    assert config.trainer.gradient_checkpointing and config.trainer.attn_implementation == "eager"
    assert (config.trainer.dtype, config.rollout.dtype) == ("float32", "float32")
    copy = round(4 * PARAMETERS / 2**30, 2)
    assert copy == 1.84 and f"one copy is {copy}" in text
    token = LAYERS * 2 * KEY_VALUE_HEADS * HEAD_WIDTH * 4
    cache = config.rollout.max_num_seqs * (config.rollout.max_model_len or 0) * token / 2**30
    assert (token, cache) == (24 * 2**10, 1.5)
    generating = copy + copy + cache + 0.6 + copy + 0.9
    training = copy + copy + 2 * copy + copy + 0.9
    assert (round(generating, 1), round(training, 1)) == (8.5, 10.1)
