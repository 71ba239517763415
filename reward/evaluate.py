"""One item through all functions of a scorer: total = sum(weight * value), clipped; any failure fails the item.

Runs inside a worker. A failure is never turned into a number.
"""

import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward.function import Failure, Outcome, RewardError, RewardSpec, Score, ScoreItem, check_value, one_line

if TYPE_CHECKING:
    from asyncio import Runner

SELF_TEST_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedFunction:
    """A loaded function, its weight in the total, and whether its self-test values hold (they hold for defaults)."""

    spec: RewardSpec
    weight: float
    has_default_parameters: bool


class Evaluator:
    """All functions of a scorer, ready to score one item at a time."""

    def __init__(self, functions: Sequence[WeightedFunction], *, clip: tuple[float, float] | None) -> None:
        self._functions = tuple(functions)
        self._clip = clip
        self._runner: Runner | None = None

    def score(self, item: ScoreItem) -> Outcome:
        """The item's Score with breakdown {name: value, name/part: value}, or the first Failure with its function.

        Its answer is that of the first function that reads one.
        """
        total = 0.0
        breakdown: dict[str, float] = {}
        answer: str | None = None
        for function in self._functions:
            name = function.spec.name
            outcome = self._call(function.spec, item)
            if isinstance(outcome, Failure):
                return Failure(outcome.kind, f"{name}: {outcome.message}")
            total += function.weight * outcome.value
            breakdown[name] = outcome.value
            answer = outcome.answer if answer is None else answer
            for part, value in outcome.breakdown.items():
                breakdown[f"{name}/{part}"] = value
        return self._total(total, breakdown, answer)

    def self_test(self, announce: Callable[[str], None]) -> None:
        """Run every function over its samples. Raises RewardError naming the function and the failing sample.

        With parameters of its own a function must still score each sample, but the expected values are not asked for.
        `announce` is told each step before it starts, so that a hang can be named as well.
        """
        for function in self._functions:
            for number, (item, expected) in enumerate(function.spec.self_test, start=1):
                step = f"self-test sample {number} of {function.spec.name}"
                announce(step)
                outcome = self._call(function.spec, item)
                if isinstance(outcome, Failure):
                    raise RewardError(f"{step} failed: {outcome.message}; {_show(item)}")
                if function.has_default_parameters and not math.isclose(
                    outcome.value, expected, rel_tol=SELF_TEST_TOLERANCE, abs_tol=SELF_TEST_TOLERANCE
                ):
                    raise RewardError(f"{step} failed: expected {expected:g}, got {outcome.value:g}; {_show(item)}")

    def _call(self, spec: RewardSpec, item: ScoreItem) -> Outcome:
        try:
            raw = spec.function(item)
            return check_value(self._finish(raw) if isinstance(raw, Awaitable) else raw)
        except Exception as error:
            return Failure("error", f"{type(error).__name__}: {one_line(str(error))}{_where(error)}")

    def _finish(self, pending: Awaitable[Any]) -> Any:
        if self._runner is None:
            import asyncio  # costs a worker 30 ms; most reward functions are plain

            self._runner = asyncio.Runner()
        return self._runner.run(_await(pending))

    def _total(self, total: float, breakdown: dict[str, float], answer: str | None) -> Outcome:
        checked = check_value(total)
        if isinstance(checked, Failure):
            return Failure("invalid_value", f"the weighted sum {checked.message}")
        if self._clip is not None:
            total = min(max(total, self._clip[0]), self._clip[1])
        return Score(total, breakdown, answer)


async def _await(pending: Awaitable[Any]) -> Any:
    return await pending


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    # The file's name only: a path says more about this machine than a peer should know.
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if len(frames) > 1 else ""


def _show(item: ScoreItem) -> str:
    return f"response {one_line(item.response, limit=80)!r}, ground_truth {one_line(item.ground_truth, limit=80)!r}"
