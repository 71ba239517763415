"""`offbeat bench curves` as it is typed: two short runs of the demo, and the figure of both."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.bench.curves import CURVES
from services.cli import app

SMALL = ["tiny.warm_start_steps=0", "run.prompts_per_step=2", "run.group_size=4", "launch.rollout_servers=1"]


@pytest.mark.parametrize("name", CURVES)
def test_every_algorithm_is_a_valid_run(name: str) -> None:
    done = CliRunner().invoke(app, ["train", "demo", "--check", *CURVES[name]])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_curves_of_two_algorithms_from_one_start_model(tmp_path: Path) -> None:
    out = tmp_path / "figures" / "curves.json"
    flags = ["--steps", "3", "--names", "rloo,cispo", "--folder", str(tmp_path), "--out", str(out)]
    done = CliRunner().invoke(app, ["bench", "curves", *flags, *SMALL])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert list(found["curves"]) == ["rloo", "cispo"] and found["problems"] == []
    for name, curve in found["curves"].items():
        rows = [json.loads(line) for line in (tmp_path / f"curve-{name}" / "metrics.jsonl").read_text().splitlines()]
        assert curve["reward_mean"] == [round(row["reward_mean"], 4) for row in rows] and len(rows) == 3
    figure = out.with_suffix(".svg").read_text()
    assert figure.count(">rloo<") == figure.count(">cispo<") == 1


def test_an_algorithm_that_is_not_there_is_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "curves", "--names", "grpo,rlooo"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "there are grpo, rloo" in done.output
