"""Arithmetic made from a seed: right answers, disjoint splits, the same rows every time."""

import pytest

from rollout.datasets.arithmetic import Split, arithmetic_rows, is_held_out, num_problems
from rollout.datasets.gsm8k import SPLITS
from rollout.datasets.row import PromptRow


def test_every_two_digit_sum_stands_in_exactly_one_split() -> None:
    train = {row.text for row in arithmetic_rows(split="train")}
    test = {row.text for row in arithmetic_rows(split="test")}
    assert not train & test
    assert train | test == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}
    assert 700 < len(test) < 920


def test_ground_truths_are_the_sums_differences_and_products() -> None:
    rows = {row.text: row.ground_truth for split in SPLITS for row in _all("+-*", split)}
    assert len(rows) == 300
    assert (rows["3+4="], rows["3-4="], rows["3*4="], rows["0*9="]) == ("7", "-1", "12", "0")


def test_the_seed_gives_the_order_and_the_size_cuts_it() -> None:
    whole = arithmetic_rows(seed=3)
    assert arithmetic_rows(seed=3, size=5) == whole[:5]
    assert arithmetic_rows(seed=4, size=5) != whole[:5]


def test_splits_of_different_seeds_and_sizes_stay_disjoint_in_a_large_space() -> None:
    train = {row.text for row in arithmetic_rows(digits=5, size=200, seed=1)}
    test = {row.text for row in arithmetic_rows(digits=5, size=20, split="test", seed=2)}
    assert len(train) == 200 and len(test) == 20
    assert not any(is_held_out(text or "") for text in train)
    assert all(is_held_out(text or "") for text in test)


def test_prompt_ids_are_unique_and_name_the_split() -> None:
    rows = arithmetic_rows(split="test")
    assert len({row.prompt_id for row in rows}) == len(rows)
    assert all(row.prompt_id == f"arithmetic/test/{row.text}" for row in rows)


def test_problems_are_counted_by_operands_and_operators() -> None:
    assert num_problems(digits=1, operators="+") == 100
    assert num_problems(digits=2, operators="+-") == 16_200
    assert num_problems(digits=3, operators="*") == 810_000


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"size": 8000}, "fewer than 8000"),
        ({"digits": 6}, "say how many"),
        ({"digits": 0}, "1 to 9"),
        ({"operators": "/"}, "operators"),
        ({"operators": "++"}, "operators"),
    ],
)
def test_a_wish_that_cannot_be_met_is_a_value_error(wish: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        arithmetic_rows(**wish)  # type: ignore[arg-type]


def _all(operators: str, split: Split) -> tuple[PromptRow, ...]:
    return arithmetic_rows(digits=1, operators=operators, split=split)
