"""Even words: the share of the words t0, t1, ... of a response whose number is even. For benches on random models.

Cheap, and it differs from sample to sample, so that the advantages of a group are real numbers.
"""

import re

from reward.function import RewardSpec, ScoreItem

WORD = re.compile(r"\bt(\d+)\b", re.ASCII)


def even_words(item: ScoreItem) -> float:
    """0 to 1; 0 where the response has no such word."""
    numbers = WORD.findall(item.response)
    return sum(number[-1] in "02468" for number in numbers) / len(numbers) if numbers else 0.0


SPEC = RewardSpec(
    name="even_words",
    version="1",
    function=even_words,
    self_test=(
        (ScoreItem(prompt="", response="t12 t7 t0 t10"), 0.75),
        (ScoreItem(prompt="", response="t151000"), 1.0),
        (ScoreItem(prompt="", response="no such word, not even t or 12"), 0.0),
    ),
)
