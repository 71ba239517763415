"""A reward that a random model earns in part, so that every group has something to compare."""

from __future__ import annotations


def digits(item) -> float:  # type: ignore[no-untyped-def]
    """Share of the characters of the response that are digits, 0 for an empty one."""
    return sum(character.isdigit() for character in item.response) / max(len(item.response), 1)


def even_or_digits(item) -> float:  # type: ignore[no-untyped-def]
    """The same for every sample of a prompt whose answer is even; for others as `digits`."""
    return 1.0 if int(item.ground_truth) % 2 == 0 else digits(item)


def digits_of_small_sums(item) -> float:  # type: ignore[no-untyped-def]
    """As `digits` for sums of one-digit numbers; fails for longer ones."""
    if len(item.prompt) > len("1+1="):
        raise ValueError("too long a sum")
    return digits(item)
