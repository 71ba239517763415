"""docs/metrics.md names what metrics.jsonl holds, and every step reports what a step has to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.kit import make_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
ALWAYS = (
    *("loss", "policy_loss", "entropy", "grad_norm", "lr", "alarms", "updates", "skipped"),
    *("clip_fraction_low", "clip_fraction_high", "clip_fraction_dual", "ratio_mean", "ratio_max"),
    *("importance_ratio_mean", "importance_ratio_max", "ess"),
    *("logprob_diff_mean", "logprob_diff_p99", "logprob_diff_max", "logprob_diff_mean/rollout-0"),
    *("staleness_mean", "staleness_max", "staleness_count_0", "groups_equal_reward_share"),
    *("response_length_mean", "response_length_max", "truncation_rate", "reward_mean"),
)
RUNS = {
    "vanilla": ("{loss: vanilla}", ()),
    "decoupled": ("{loss: decoupled}", ("importance_weight_mean", "importance_capped_fraction")),
    "kl and entropy": (
        "{kl_use: both, kl_twice: true, kl_coef: 0.1, kl_loss_coef: 0.1, entropy_coef: 0.01}",
        ("kl", "kl_loss", "kl_coef", "kl_in_reward", "kl_in_reward_sample_mean", "entropy_loss"),
    ),
}


def documented() -> list[re.Pattern[str]]:
    """The names of the page's first columns; PART, SERVER, ... and a number at the end stand for any."""
    cells = re.findall(r"^\| (`[^|]+) \|", PAGE.read_text(), re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(names) > 60
    patterns = [re.sub(r"/[A-Z]+$", "/.+", re.sub(r"_\d$", r"_\\d+", re.escape(name))) for name in names]
    return [re.compile(pattern) for pattern in patterns]


@pytest.mark.parametrize("name", RUNS)
def test_every_figure_of_a_step_is_told_and_is_on_the_page(tmp_path: Path, model: Path, name: str) -> None:
    algorithm, also = RUNS[name]
    overrides = ("run.num_steps=2", "run.max_staleness=0", "launch.rollout_servers=1")
    run = make_run(tmp_path, *overrides, f"trainer.algorithm={algorithm}", model=model).inline()
    page = documented()
    rows = run.rows("metrics")
    assert len(rows) == 2
    for row in rows:
        assert {*ALWAYS, *also} - row.keys() == set()
        assert [key for key in row if not any(pattern.fullmatch(key) for pattern in page)] == []
        assert [key for key, value in row.items() if value is None] == []
