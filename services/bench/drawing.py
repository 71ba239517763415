"""Reward curves as one SVG figure; the same numbers give the same file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

WINDOW = 10
"""Steps of the moving mean that is drawn."""


def draw(curves: Mapping[str, Sequence[float]], file: Path) -> None:
    """Smoothed rewards over steps, a line for each name."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, rewards in curves.items():
        axes.plot(range(1, len(rewards) + 1), smoothed(rewards), label=name, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel(f"mean reward, over the last {WINDOW} steps")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "offbeat", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean of each value and of those before it, WINDOW at most."""
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - WINDOW) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]
