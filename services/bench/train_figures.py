"""Figures of `bench train`: tokens a second, share of the peak (MFU), ours over bare, and scaling."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from services.bench.bare.job import Answer
from services.bench.report import spread

Answers = Mapping[int, Mapping[str, list[Answer]]]
"""GPUs -> row -> what each round answered."""


def flops_per_token(num_parameters: int, model: Mapping[str, Any], *, sequence: int) -> float:
    """6 for each parameter (a tied embedding counts once, as the head) and 6 s for each feature of the attention heads.

    That is forward and backward; causal attention counts half, and what checkpointing computes again does not count.
    """
    features = model["num_hidden_layers"] * model["num_attention_heads"] * model["head_dim"]
    return 6.0 * num_parameters + 6.0 * features * sequence


def tables(
    answers: Answers, *, tokens: int, model: Mapping[str, Any], sequence: int, peak: float | None
) -> dict[str, Any]:
    """By number of GPUs and row. tokens: of a step on one GPU; peak: of one GPU in flop/s, None where there is none."""
    rates = {gpus: {name: rate(found, tokens * gpus) for name, found in rows.items()} for gpus, rows in answers.items()}
    result: dict[str, Any] = {}
    for gpus, rows in answers.items():
        result[str(gpus)] = table = {}
        for name, found in rows.items():
            table[name] = row = plain(found, tokens * gpus)
            if peak is not None:
                flops = flops_per_token(found[0]["num_parameters"], model, sequence=sequence)
                row["mfu"] = round(rates[gpus][name] * flops / (gpus * peak), 4)
            if name.startswith("ours"):
                bare = {other: value for other, value in rates[gpus].items() if other.startswith("bare")}
                row["over"] = {other: round(rates[gpus][name] / value, 3) for other, value in bare.items()}
            if gpus > min(rates) and name in rates[min(rates)]:
                row["scaling"] = round(rates[gpus][name] / rates[min(rates)][name] * min(rates) / gpus, 3)
    return result


def rate(found: list[Answer], tokens: int) -> float:
    """Tokens a second of the median step of all rounds."""
    return tokens / statistics.median(second for answer in found for second in answer["step_seconds"])


def plain(found: list[Answer], tokens: int) -> dict[str, Any]:
    """What was measured of one row."""
    seconds = [second for answer in found for second in answer["step_seconds"]]
    row = {
        "tokens_per_s": spread([tokens / second for second in seconds], digits=1),
        "step_seconds": spread(seconds),
        "losses": [round(loss, 5) for loss in found[0]["losses"]],
        "num_parameters": found[0]["num_parameters"],
    }
    peaks = [answer["peak_gib"] for answer in found if "peak_gib" in answer]
    return row | ({"peak_gib": round(max(peaks), 2)} if peaks else {})
