"""What is evaluated on: a split apart from training, whatever its size was said to be."""

from __future__ import annotations

import pytest

from rollout.datasets import load_rows
from rollout.datasets.config import DataConfig
from services.configs.evaluation import EvaluationConfig


@pytest.mark.parametrize(
    ("digits", "size", "num_prompts", "expected"),
    [
        (1, 50, 64, None),  # the test split is smaller than either number: all of it
        (2, 7000, 64, 64),  # of more problems than the test split has
        (2, None, 5, 5),
        (6, 1000, 32, 32),  # too many to be counted
    ],
)
def test_the_held_out_prompts_are_there_whatever_the_size_of_the_training_split(
    digits: int, size: int | None, num_prompts: int, expected: int | None
) -> None:
    data = DataConfig(type="arithmetic", digits=digits, size=size)
    rows = load_rows(EvaluationConfig(num_prompts=num_prompts).prompts_of(data)).rows
    trained = {row.text for row in load_rows(data).rows}
    assert rows and not trained & {row.text for row in rows}
    assert len(rows) == expected if expected else 0 < len(rows) < num_prompts


def test_a_source_of_its_own_comes_first_and_the_split_can_be_the_training_one() -> None:
    data = DataConfig(type="arithmetic", digits=1)
    own = EvaluationConfig(data=DataConfig(type="arithmetic", digits=3, size=9), split="train", num_prompts=4)
    rows = load_rows(own.prompts_of(data)).rows
    assert [len(row.text or "") for row in rows] == [8] * 4
    assert [row.prompt_id.split("/")[1] for row in rows] == ["train"] * 4
