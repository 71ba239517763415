"""Length: the soft overlong penalty of DAPO (arXiv 2503.14476, eq. 13), to be added to a reward of correctness.

    penalty = min(-(len - (L - B)) / B * factor, 0)      L = max_length, B = buffer_length

0 up to L - B, then falling in a line to -factor at L, and on beyond it.
"""

from reward.function import RewardSpec, ScoreItem


def length(item: ScoreItem, *, max_length: int = 4096, buffer_length: int = 1024, factor: float = 1.0) -> float:
    """The penalty, 0 or negative. Lengths count tokens if the item has extra["response_tokens"], else characters.

    Raises ValueError unless 0 < buffer_length <= max_length and factor >= 0, or if response_tokens is no whole number.
    """
    if not 0 < buffer_length <= max_length:
        raise ValueError(f"need 0 < buffer_length <= max_length, not {buffer_length} and {max_length}")
    if not factor >= 0:
        raise ValueError(f"factor must be >= 0, not {factor}")
    tokens = item.extra.get("response_tokens")
    response_length = len(item.response) if tokens is None else int(tokens)
    excess = response_length - (max_length - buffer_length)
    return 0.0 if excess <= 0 else -excess / buffer_length * factor


def _item(num_tokens: int) -> ScoreItem:
    return ScoreItem(prompt="", response="", extra={"response_tokens": str(num_tokens)})


SPEC = RewardSpec(
    name="length",
    version="1",
    function=length,
    self_test=(
        (ScoreItem(prompt="", response="short"), 0.0),
        (_item(3072), 0.0),
        (_item(3584), -0.5),
        (_item(4096), -1.0),
    ),
)
