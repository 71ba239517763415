"""`offbeat bench logprobs` at a small size on a CPU, as it is typed."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli import app


def test_the_ways_to_score_tokens_are_timed_on_the_same_work(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--device", "cpu", "--tokens", "300", "--vocabulary", "2000", "--hidden", "16", "--max-logits-mib", "1"]
    more = ["--dtype", "float32", "--ways", "plain,eager", "--rounds", "2", "--out", str(out)]
    done = CliRunner().invoke(app, ["bench", "logprobs", *flags, *more])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["work"]["ways"] == ["plain", "eager"] and "compiled" not in found
    for way in ("plain", "eager"):
        figures = found[way]
        assert figures["tokens_per_s"]["max"] == pytest.approx(300 / figures["seconds"]["min"], rel=0.05)
        assert figures["fits"] and figures["peak_mib"] is None, "memory is counted on GPUs"
    assert found["plain"]["logprob_mean"] == pytest.approx(found["eager"]["logprob_mean"], abs=1e-4)


def test_a_way_that_does_not_exist_is_told() -> None:
    done = CliRunner().invoke(app, ["bench", "logprobs", "--device", "cpu", "--ways", "plain,fast"])
    assert done.exit_code == 2 and "there are plain, eager, compiled" in done.output
