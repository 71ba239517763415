"""When a version is evaluated, and what came of it so far; the ledger keeps it for a conductor that comes back.

A version that the trainer reaches again after a restart is not evaluated again. Where pushes have skipped the version
that was due, the next one stands in for it.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from pydantic import BaseModel

from services.configs.evaluation import EvaluationConfig

FACT = "evaluation"
SHOWN = ("version", "pass@1")
Result = dict[str, Any]


class Facts(Protocol):
    """What is remembered by name; services/records/ledger.py."""

    def fact(self, name: str, default: str = "") -> str: ...
    def set_fact(self, name: str, value: str) -> None: ...


class Memory(BaseModel):
    """What outlives a conductor."""

    number: int = 0
    """Of the newest evaluation that was begun; they are counted from 1."""
    version: int = -1
    """That it was begun for."""
    open: bool = False
    """It is not over."""
    dropped: int = 0
    """Evaluations that were begun and given up."""
    last: Result | None = None
    best: Result | None = None
    """By pass@1, then by the mean reward; of equal ones the earlier."""


class Occasions:
    """Says what is due, and remembers what was done."""

    def __init__(self, config: EvaluationConfig, facts: Facts, *, num_steps: int) -> None:
        self._config = config
        self._facts = facts
        self._num_steps = num_steps
        self.memory = Memory.model_validate(json.loads(facts.fact(FACT, "{}")))

    def due(self, version: int) -> bool:
        """Whether an evaluation is to begin, now that the rollout servers have `version`."""
        every, before = self._config.every_steps, self.memory.version
        if not every or version <= before:
            return False
        if version == 0:
            return self._config.at_start
        return version // every > max(before, 0) // every or (version >= self._num_steps and self._config.at_end)

    def begin(self, version: int) -> int:
        """Note that an evaluation begins; returns its number."""
        self._note(number=self.memory.number + 1, version=version, open=True)
        return self.memory.number

    def end(self, result: Result) -> None:
        """Note what it came to."""
        best = self.memory.best
        better = best is None or standing(result) > standing(best)
        self._note(open=False, last=result, best=result if better else best)

    def drop(self) -> None:
        """Note that it was given up."""
        self._note(open=False, dropped=self.memory.dropped + 1)

    def summary(self) -> Result | None:
        """For summary.json; None where nothing is evaluated."""
        if not self._config.every_steps:
            return None
        return {"last": self.memory.last, "best": self.memory.best, "dropped": self.memory.dropped}

    def shown(self) -> dict[str, float]:
        """For the live view: the figures of the last evaluation, and the best version."""
        best = numbers(self.memory.best or {})
        return numbers(self.memory.last or {}) | {f"best_{name}": best[name] for name in SHOWN if name in best}

    def _note(self, **changes: Any) -> None:
        self.memory = self.memory.model_copy(update=changes)
        self._facts.set_fact(FACT, self.memory.model_dump_json())


def numbers(result: Result) -> dict[str, float]:
    """What in a result is a number."""
    return {name: float(value) for name, value in result.items() if isinstance(value, int | float)}


def standing(result: Result) -> tuple[float, float]:
    """How good a result is; one without a verdict comes last."""
    return result.get("pass@1", -1.0), result.get("mean_reward", float("-inf"))
