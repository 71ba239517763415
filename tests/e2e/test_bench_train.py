"""`offbeat bench train` at a tiny size on a CPU, as it is typed: our step and the bare loop, one process and two."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli import app
from trainer.small.shapes import make_shape

SMALL = ["--shape", "tiny", "--sequence", "96", "--prompt-tokens", "32", "--micro-batches", "2", "--steps", "2"]
SMALL += ["--warm-steps", "1", "trainer.threads=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where benches lie, with the tiny shape made."""
    found = tmp_path_factory.mktemp("bench")
    make_shape("tiny", found / "models" / "tiny-float32", dtype="float32")
    return found


def bench(folder: Path, *words: str) -> dict[str, Any]:
    out = folder / "out.json"
    done = CliRunner().invoke(app, ["bench", "train", "--folder", str(folder), "--out", str(out), *SMALL, *words])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_our_step_stands_beside_the_bare_loop(folder: Path) -> None:
    profile = folder / "kernels.txt"
    found = bench(folder, "--rows", "ours,ours+proximal,bare", "--profile", str(profile))
    rows = found["gpus"]["1"]
    assert list(rows) == ["ours", "ours+proximal", "bare"] and found["problems"] == []
    assert all(row["num_parameters"] == 106_944 and len(row["losses"]) == 2 for row in rows.values())
    ours, bare = (rows[name]["step_seconds"]["median"] for name in ("ours", "bare"))
    assert rows["ours"]["over"]["bare"] == pytest.approx(bare / ours, rel=0.02)
    assert rows["bare"]["losses"][0] == pytest.approx(6.238, abs=0.1), "near log 512: the model knows nothing"
    assert "mfu" not in rows["ours"], "there is no peak of a GPU to divide by"
    titles = [line for line in profile.read_text().splitlines() if line.endswith(" on 1")]
    assert titles == ["ours on 1", "ours+proximal on 1", "bare on 1"] and "aten::mm" in profile.read_text()


@pytest.mark.slow
def test_two_ranks_share_a_step_and_learn_as_one(folder: Path) -> None:
    one = bench(folder, "--rows", "ours,bare", "--micro-batches", "4")["gpus"]["1"]
    two = bench(folder, "--rows", "ours,bare", "--gpus", "2")["gpus"]["2"]
    for name in ("ours", "bare"):
        assert two[name]["losses"] == pytest.approx(one[name]["losses"], abs=2e-5)
        assert two[name]["num_parameters"] == one[name]["num_parameters"]


def test_a_row_that_fails_is_told_and_the_others_are_measured(folder: Path) -> None:
    words = ["bench", "train", "--folder", str(folder), "--out", str(folder / "out.json"), *SMALL]
    done = CliRunner().invoke(app, [*words, "--rows", "ours,bare", "trainer.device=cuda:7"])
    assert done.exit_code == 1
    found = json.loads((folder / "out.json").read_text())
    assert list(found["gpus"]["1"]) == ["bare"] and found["problems"][0].startswith("ours on 1: ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rows", "ours,fast"], "there are ours, bare"),
        (["--rows", "bare+fused"], "only compile, cudnn"),
        (["--gpus", "1,0"], "numbers from 1 on"),
        (["--prompt-tokens", "8192"], "leaves nothing"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(flags: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "train", *flags], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and said in done.output
