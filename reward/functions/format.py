"""Format: does the response hold an answer in the asked-for form? 1.0 or 0.0, whatever the answer is."""

import re

from reward.function import RewardSpec, ScoreItem

FINAL_ANSWER = r"####\s*\S[^\n]*\s*\Z|<answer>.*?\S.*?</answer>"
"""A last line "#### something", or something between <answer> and </answer>."""


def format(item: ScoreItem, *, pattern: str = FINAL_ANSWER) -> float:
    """1.0 if the regular expression `pattern` (where "." also matches newlines) is found in the response, else 0.0."""
    return 1.0 if re.search(pattern, item.response, re.DOTALL) else 0.0


SPEC = RewardSpec(
    name="format",
    version="1",
    function=format,
    self_test=(
        (ScoreItem(prompt="", response="So it is 5.\n#### 5\n"), 1.0),
        (ScoreItem(prompt="", response="<answer>\n5\n</answer> done"), 1.0),
        (ScoreItem(prompt="", response="#### 5\nand some more talk"), 0.0),
        (ScoreItem(prompt="", response="The answer is 5."), 0.0),
    ),
)
