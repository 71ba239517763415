"""Smoothing of reward curves, by hand, and the figure as a file."""

from pathlib import Path

import pytest

from services.bench.drawing import draw, smoothed


def test_a_curve_is_smoothed_over_the_last_ten_steps() -> None:
    assert smoothed([1.0, 3.0, 5.0]) == [1.0, 2.0, 3.0]
    assert smoothed([float(value) for value in range(12)])[-1] == pytest.approx(6.5), "mean of 2 to 11"
    assert smoothed([]) == []


def test_the_same_numbers_give_the_same_figure(tmp_path: Path) -> None:
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for file in files:
        draw({"grpo": [0.1, 0.5], "gspo": [0.2, 0.4]}, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert all(f">{name}<" in files[0].read_text() for name in ("grpo", "gspo"))
