"""GSM8K: is the final number of the response the ground truth? 1.0 or 0.0.

Answers are read as verl's `gsm8k.compute_score` reads them (last match, only the end of the response), and compared as
text after "$", "," and a trailing "." are dropped on both sides: "$1,000." equals "1000"; "42.0" does not equal "42".
"""

import re
from functools import partial
from typing import Literal

from reward.function import RewardSpec, Score, ScoreItem

STRICT_ANSWER = re.compile(r"#### (\$?-?\$?[0-9.,]+)")
NUMBER = re.compile(r"-?\$?[0-9.,]+")

Method = Literal["strict", "flexible"]


def gsm8k(item: ScoreItem, *, method: Method = "strict", clip_characters: int = 300) -> Score:
    """1.0 if the answer found in the last `clip_characters` characters of the response is the ground truth, else 0.0.

    Method "strict" needs "#### number"; "flexible" takes the last number in the text.
    A ground truth may be a whole GSM8K solution: what follows its "####" counts. Raises ValueError if it has no number.
    """
    expected = plain_number(item.ground_truth.rpartition("####")[2])
    if not any(char.isdigit() for char in expected):
        raise ValueError("ground_truth has no number")
    found = find_answer(item.response[-clip_characters:], method=method)
    return Score(1.0 if found == expected else 0.0, answer=found or "")


def find_answer(text: str, *, method: Method) -> str | None:
    """The answer in `text` as a plain number, or None. Raises ValueError for an unknown method."""
    if method == "strict":
        found = STRICT_ANSWER.findall(text)
        return plain_number(found[-1]) if found else None
    if method == "flexible":
        numbers = (plain_number(number) for number in reversed(NUMBER.findall(text)))
        return next((number for number in numbers if any(char.isdigit() for char in number)), None)
    raise ValueError(f"method must be 'strict' or 'flexible', not {method!r}")


def plain_number(text: str) -> str:
    """`text` without blanks around it, "$", "," and trailing "."."""
    return text.strip().replace("$", "").replace(",", "").rstrip(".")


def _item(response: str, ground_truth: str) -> ScoreItem:
    return ScoreItem(prompt="", response=response, ground_truth=ground_truth, data_source="openai/gsm8k")


STRICT = RewardSpec(
    name="gsm8k",
    version="1",
    function=gsm8k,
    self_test=(
        (_item("48 / 2 = 24, so 72 in all.\n#### 72", "72"), 1.0),
        (_item("#### $1,000.", "1000"), 1.0),
        (_item("The answer is 72.", "72"), 0.0),
        (_item("#### 71", "72"), 0.0),
    ),
)
FLEXIBLE = RewardSpec(
    name="gsm8k_flexible",
    version="1",
    function=partial(gsm8k, method="flexible"),
    self_test=(
        (_item("The answer is 72.", "72"), 1.0),
        (_item("72 or rather 71", "72"), 0.0),
        (_item("I do not know.", "72"), 0.0),
    ),
)
