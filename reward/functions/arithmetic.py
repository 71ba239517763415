"""Arithmetic: the whole response, stripped of blanks, is the ground truth. 1.0 or 0.0."""

from reward.function import RewardSpec, ScoreItem


def arithmetic(item: ScoreItem) -> float:
    """1.0 on an exact match of the stripped texts, else 0.0. Raises ValueError for an empty ground truth."""
    expected = item.ground_truth.strip()
    if not expected:
        raise ValueError("ground_truth is empty")
    return 1.0 if item.response.strip() == expected else 0.0


SPEC = RewardSpec(
    name="arithmetic",
    version="1",
    function=arithmetic,
    self_test=(
        (ScoreItem(prompt="2+3=", response=" 5\n", ground_truth="5"), 1.0),
        (ScoreItem(prompt="2+3=", response="6", ground_truth="5"), 0.0),
        (ScoreItem(prompt="2+3=", response="5 is the sum", ground_truth="5"), 0.0),
        (ScoreItem(prompt="2+3=", response="", ground_truth="5"), 0.0),
    ),
)
