"""Figures of `offbeat bench train`, worked out by hand."""

import pytest

from services.bench.train_figures import flops_per_token, tables

SMALL = {"num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128}
"""Of Qwen3-0.6B, which has 596,049,920 parameters."""
PARAMETERS = 596_049_920


def test_flops_of_a_token_are_those_of_weights_and_causal_attention() -> None:
    assert flops_per_token(PARAMETERS, SMALL, sequence=8192) == 6 * 596_049_920 + 6 * 28 * 2048 * 8192


def test_a_plain_loop_of_the_small_model_reaches_a_fifth_of_the_peak() -> None:
    answer = {"step_seconds": [32768 / 31_300], "losses": [1.0], "num_parameters": PARAMETERS, "peak_gib": 20.0}
    found = tables({1: {"bare": [answer]}}, tokens=32768, model=SMALL, sequence=8192, peak=990e12)
    assert found["1"]["bare"]["mfu"] == 0.2022


def test_rows_are_compared_and_scaling_counts_from_the_fewest_gpus() -> None:
    def answers(*seconds: float) -> list[dict[str, object]]:
        return [{"step_seconds": [one], "losses": [], "num_parameters": 1} for one in seconds]

    measured = {
        1: {"ours": answers(2.0, 1.0, 4.0), "bare": answers(1.8), "bare+compile": answers(1.6)},
        4: {"ours": answers(2.5), "bare": answers(2.0)},
    }
    found = tables(measured, tokens=1000, model=SMALL, sequence=10, peak=None)
    assert found["1"]["ours"]["over"] == {"bare": 0.9, "bare+compile": 0.8}
    assert found["1"]["ours"]["tokens_per_s"] == {"min": 250.0, "median": 500.0, "max": 1000.0}
    assert found["4"]["ours"]["scaling"] == pytest.approx(2.0 / 2.5) and "scaling" not in found["1"]["ours"]
    assert found["4"]["bare"]["scaling"] == 0.9 and found["4"]["ours"]["over"] == {"bare": 0.8}
    assert "mfu" not in found["1"]["ours"]
