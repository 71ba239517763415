"""What benches compute from what a run leaves behind, with numbers that can be checked by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.bench.loop import figures_of, medians
from services.bench.report import percentile, ranks


def written(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def step(number: int, **values: float | None) -> dict[str, Any]:
    """A step of 8 samples and 100 response tokens that ends at 2 s times its number."""
    usual = {
        "run_seconds": 2.0 * number,
        "num_samples": 8.0,
        "tokens": 100.0,
        "step_seconds": 0.5,
        "wait_seconds": 0.25,
        "conductor_cpu_seconds": 0.1,
        "staleness_mean": 1.0,
        "logprob_diff_mean": 0.01,
    }
    return {"step": number, **usual, **values}


def push(version: int, seconds: float, stall: float) -> dict[str, Any]:
    return {"kind": "push", "policy_version": version, "seconds": seconds, "stall_seconds": stall}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four steps, of which the first is a warm-up."""
    wild = {"run_seconds": 2.0, "tokens": 9999.0, "step_seconds": 99.0, "logprob_diff_mean": 9.0}
    steps = [step(1, **wild), step(2), step(3, logprob_diff_mean=0.02), step(4, logprob_diff_mean=None)]
    written(tmp_path / "metrics.jsonl", steps)
    events = [push(0, 9.0, 9.0), push(1, 8.0, 8.0), {"kind": "joined"}, push(2, 0.03, 0.002), push(3, 0.01, 0.004)]
    written(tmp_path / "events.jsonl", [*events, push(4, 0.02, 0.001)])
    return tmp_path


def test_the_figures_of_a_run_leave_the_warm_up_out(run: Path) -> None:
    figures = figures_of(run, warm_steps=1, prompt_tokens=10)
    assert figures["samples_per_s"] == 24 / 6.0
    assert figures["tokens_per_s"] == 300 / 6.0
    assert figures["train_tokens_per_s"] == (300 + 10 * 24) / 1.5
    assert (figures["step_ms"], figures["train_ms"], figures["wait_ms"]) == (2000.0, 500.0, 250.0)
    assert figures["conductor_cpu_ms"] == pytest.approx(100.0)
    assert figures["conductor_share_of_step"] == pytest.approx(0.3 / 6.0)
    assert figures["logprob_diff_mean"] == pytest.approx(0.015), "a step without the figure does not count"


def test_the_pushes_of_the_warm_up_are_left_out(run: Path) -> None:
    figures = figures_of(run, warm_steps=1)
    assert (figures["push_p50_ms"], figures["push_p90_ms"]) == (20.0, 30.0)
    assert (figures["stall_p50_ms"], figures["stall_max_ms"]) == (2.0, 4.0)


def test_percentiles_are_nearest_ranks() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.9, 1.0)] == [1.0, 3.0, 5.0, 5.0]
    assert ranks([2.0, 1.0]) == {"min": 1.0, "p50": 1.0, "p90": 2.0, "max": 2.0}


def test_modes_are_compared_pair_by_pair_and_a_half_done_pair_waits() -> None:
    rows = {"sync": [{"samples_per_s": 10.0}, {"samples_per_s": 20.0}], "async": [{"samples_per_s": 30.0}]}
    found = medians(rows)
    assert found["sync"]["samples_per_s"] == {"min": 10.0, "median": 15.0, "max": 20.0}
    assert found["async_over_sync"]["median"] == 3.0
    assert "async_over_sync" not in medians({"sync": [], "async": rows["async"]})
