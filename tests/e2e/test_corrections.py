"""Off-policy corrections and reward shaping through a whole run: what they say fits what the ledger has."""

from __future__ import annotations

import pytest

from services.records.book import Batch
from tests.e2e.conftest import StartRun
from tests.e2e.kit import Run, assert_effectively_once

STEPS, BUFFER = 6, 3
WEIGHTED = "{weights: token, bound: mask, weight_min: 0.5, normalize: true, reject: [{statistic: token_k1, high: 9}]}"
REJECTING = "{weights: sequence, second_moment: 1.0e-7, reject: [{statistic: seq_max_k2, high: 0.5}]}"


def tokens_of(batch: Batch) -> int:
    return sum(trajectory.response_ids.shape[0] for trajectory in batch.trajectories)


def ended(run_inline: StartRun, correction: str, *overrides: str) -> Run:
    run = run_inline(
        f"run.num_steps={STEPS}",
        "trainer.optimizer.lr=3.0e-4",
        f"trainer.algorithm.correction={correction}",
        *overrides,
    )
    assert_effectively_once(run, steps=STEPS)
    assert all(row["updates"] == 1 and row["skipped"] == 0 for row in run.rows("metrics"))
    return run


def test_masked_weights_overlong_penalty_and_resampling(run_inline: StartRun) -> None:
    overlong = f"trainer.algorithm.overlong={{buffer: {BUFFER}}}"
    run = ended(run_inline, WEIGHTED, "trainer.algorithm.loss=vanilla", overlong, "trainer.algorithm.resample=pow")
    limit = run.config.rollout.sampling.max_tokens
    for row, batch in zip(run.rows("metrics"), run.batches(), strict=True):
        assert row["importance_weight_mean"] == pytest.approx(1.0, abs=1e-5)
        assert 0 < row["importance_weight_ess"] <= 1
        assert row["rejected_token_share"] == 0
        by_age = [value for name, value in row.items() if name.startswith("tokens_staleness_")]
        assert sum(by_age) == tokens_of(batch)
        over = [trajectory.response_ids.shape[0] - (limit - BUFFER) for trajectory in batch.trajectories]
        assert row["overlong_share"] == pytest.approx(sum(one > 0 for one in over) / len(over))
        mean = -sum(max(one, 0) for one in over) / BUFFER / len(over)
        assert row["overlong_penalty_mean"] == pytest.approx(mean, abs=1e-5)
        assert 0 < row["resampled_unique_share"] <= 1


def test_with_sequence_weights_rejected_tokens_leave_the_counts_of_the_step(run_inline: StartRun) -> None:
    run = ended(run_inline, REJECTING, "trainer.algorithm.loss=vanilla")
    rows = run.rows("metrics")
    for row, batch in zip(rows, run.batches(), strict=True):
        kept = tokens_of(batch) * (1 - row["rejected_token_share"])
        assert row["tokens"] == pytest.approx(kept, abs=0.01)
        assert row["rejected_token_share"] >= row["rejected_token_share/second_moment"]
    assert max(row["rejected_token_share"] for row in rows) > 0, "stale tokens are far enough off for this threshold"
