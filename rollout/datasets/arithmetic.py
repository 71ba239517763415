"""Arithmetic made from a seed: "37+58=" with ground truth "95"; the reward is an exact match of the response.

A problem belongs to the test split when a hash of its text says so, whatever the seed and the size: the two splits
cannot meet.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Literal

from rollout.datasets.row import PromptRow

Split = Literal["train", "test"]

DATA_SOURCE = "offbeat/arithmetic"
HELD_OUT_ONE_IN = 10
ENUMERABLE = 100_000


def arithmetic_rows(
    *, size: int | None = None, digits: int = 2, operators: str = "+", split: Split = "train", seed: int = 0
) -> tuple[PromptRow, ...]:
    """`size` different problems with operands of exactly `digits` digits, in an order that the seed gives.

    Without a size: the whole split (for two-digit addition about 7,290 and 810 problems). Raises ValueError when the
    split has fewer than `size` problems, or when the whole split is asked for and there are more than 100,000 problems.
    """
    space = num_problems(digits=digits, operators=operators)
    if size is None and space > ENUMERABLE:
        raise ValueError(f"there are {space} problems of {digits} digits: say how many to make (size)")
    problems = (_problem(index, digits=digits, operators=operators) for index in _indices(space, seed=seed))
    chosen = ((text, answer) for text, answer in problems if is_held_out(text) == (split == "test"))
    rows = tuple(
        PromptRow(
            prompt_id=f"arithmetic/{split}/{text}",
            text=text,
            ground_truth=answer,
            data_source=DATA_SOURCE,
            response=answer,
        )
        for text, answer in itertools.islice(chosen, size)
    )
    if size is not None and len(rows) < size:
        raise ValueError(
            f"the {split} split of {digits}-digit {operators!r} has {len(rows)} problems, fewer than {size}"
        )
    return rows


def num_problems(*, digits: int, operators: str) -> int:
    """Problems of both splits together: (operands of that many digits)^2 for each operator. Raises ValueError."""
    if not 1 <= digits <= 9:
        raise ValueError(f"digits must be 1 to 9, not {digits}")
    if not operators or set(operators) - set("+-*") or len(set(operators)) != len(operators):
        raise ValueError(f"operators must be some of + - *, each once, not {operators!r}")
    return len(_operands(digits)) ** 2 * len(operators)


def is_held_out(text: str) -> bool:
    """Whether a problem belongs to the test split: one in ten, by the SHA-256 of its text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def _operands(digits: int) -> range:
    return range(10) if digits == 1 else range(10 ** (digits - 1), 10**digits)


def _indices(space: int, *, seed: int) -> Iterator[int]:
    """Every index below `space` once: shuffled when there are few, drawn without repetition when there are many."""
    draw = random.Random(seed)
    if space <= ENUMERABLE:
        yield from draw.sample(range(space), space)
        return
    seen: set[int] = set()
    while len(seen) < space:
        index = draw.randrange(space)
        if index not in seen:
            seen.add(index)
            yield index


def _problem(index: int, *, digits: int, operators: str) -> tuple[str, str]:
    operands = _operands(digits)
    rest, second = divmod(index, len(operands))
    which, first = divmod(rest, len(operands))
    a, operator, b = operands[first], operators[which], operands[second]
    answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
    return f"{a}{operator}{b}=", str(answer)
