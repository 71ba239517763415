"""What a reward function is: one item in, one number (with its parts) or one named failure out.

A bad score is data: whatever a function returns passes `check_value`, so that NaN, None or a string becomes a `Failure`
that is counted and never a silent 0. Nothing here imports more than the standard library: workers start with it.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, TypeAlias

FailureKind: TypeAlias = Literal["timeout", "crash", "invalid_value", "error"]
FAILURE_KINDS: tuple[FailureKind, ...] = ("timeout", "crash", "invalid_value", "error")

# A reward travels as float32 into the trainer; what does not fit would arrive there as infinity.
LARGEST_VALUE = 3.4028234663852886e38
MAX_PARTS = 64
MAX_PART_NAME_CHARACTERS = 128
MAX_ANSWER_CHARACTERS = 1000


class RewardError(Exception):
    """A reward service cannot start or go on: unknown target, failing self-test, workers that do not come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """What a reward function sees of one sample. `extra` holds the prompt's further fields, as text."""

    prompt: str
    response: str
    ground_truth: str = ""
    data_source: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """A finite reward and the named parts it came from (also finite; not necessarily summing to `value`).

    answer: what the function read as the response's answer, by which an evaluation takes a majority: "" where it looked
    and found none, None where it reads none.
    """

    value: float
    breakdown: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample has no reward. `message` is one line, bounded, without paths and control characters."""

    kind: FailureKind
    message: str


Outcome: TypeAlias = Score | Failure
RewardValue: TypeAlias = float | Score | Mapping[str, float | str]
RewardFunction: TypeAlias = Callable[..., RewardValue | Awaitable[RewardValue]]
"""Called as function(item, **parameters); plain or async. A mapping must have "score"; its other keys are parts,
but for "answer" where it holds text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """A reward function with its version and the samples (item, expected value) that prove it at every start."""

    name: str
    version: str
    function: RewardFunction
    self_test: tuple[tuple[ScoreItem, float], ...] = ()


def check_value(raw: object) -> Score | Failure:
    """A checked Score from whatever a reward function returned, or Failure("invalid_value") naming what came back."""
    value: object = raw
    parts: object = {}
    answer: object = None
    if isinstance(raw, Score):
        value, parts, answer = raw.value, raw.breakdown, raw.answer
    elif isinstance(raw, Mapping):
        if "score" not in raw:
            return Failure("invalid_value", f"returned a mapping without 'score' (keys: {_key_list(raw)})")
        parts = {key: part for key, part in raw.items() if key != "score"}
        value, answer = raw["score"], parts.pop("answer") if isinstance(parts.get("answer"), str) else None
    try:
        return Score(_finite(value), _checked_parts(parts), _checked_answer(answer))
    except ValueError as error:
        return Failure("invalid_value", str(error))


def one_line(text: str, *, limit: int = 300) -> str:
    """`text` with control and invisible characters escaped and at most `limit` characters: fit for a log line."""
    clipped = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in clipped)


def _finite(value: object, *, what: str = "returned") -> float:
    # bool is an int to Python, and "True" as a reward is nearly always a forgotten float().
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{what} {_describe(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{what} an integer too large for a float") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}, not a finite number")
    if abs(number) > LARGEST_VALUE:
        raise ValueError(f"{what} {number:g}, which does not fit float32")
    return number


def _checked_parts(parts: object) -> dict[str, float]:
    if not isinstance(parts, Mapping):
        raise ValueError(f"returned a breakdown that is {_describe(parts)}, not a mapping")
    if len(parts) > MAX_PARTS:
        raise ValueError(f"returned {len(parts)} parts, more than {MAX_PARTS}")
    for name in parts:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_PART_NAME_CHARACTERS:
            raise ValueError(f"returned a part whose name is {_describe(name)}, not a short text")
    return {name: _finite(part, what=f"part {one_line(name)!r} is") for name, part in parts.items()}


def _checked_answer(answer: object) -> str | None:
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"returned an answer that is {_describe(answer)}, not text")
    return None if answer is None else answer[:MAX_ANSWER_CHARACTERS]


def _describe(value: object) -> str:
    if value is None or isinstance(value, bool):
        return repr(value)
    kind = type(value).__name__
    if isinstance(value, str):
        return f"str {one_line(value, limit=40)!r}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{kind} of shape {shape}"
    return f"{kind} of {len(value)} values" if isinstance(value, (list, tuple, dict, set)) else f"an object {kind}"


def _key_list(raw: Mapping[object, object]) -> str:
    return one_line(", ".join(sorted(str(key) for key in list(raw)[:16])), limit=120) or "none"
