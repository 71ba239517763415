"""The reward config says what is wrong with it, and names every unit."""

import pytest
from pydantic import BaseModel, ValidationError

from reward.config import FunctionConfig, RewardConfig


@pytest.mark.parametrize("model", [FunctionConfig, RewardConfig])
def test_every_field_is_described(model: type[BaseModel]) -> None:
    assert all(field.description for field in model.model_fields.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"functions": []}, "functions"),
        ({"workers": 3}, "workers"),
        ({"num_workers": 0}, "num_workers"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds"),
        ({"max_pending": 0}, "max_pending"),
        ({"reward_clip": (1.0, -1.0)}, "reward_clip"),
        ({"reward_clip": (0.0, float("inf"))}, "reward_clip"),
        ({"memory_limit_mb": 1}, "memory_limit_mb"),
        ({"functions": [{"target": "gsm8k", "weight": float("nan")}]}, "weight"),
        ({"functions": [{"target": "gsm8k", "name": "a/b"}]}, "name"),
        ({"functions": [{"target": "gsm8k"}, {"target": "./a.py:gsm8k"}]}, "named alike: gsm8k"),
    ],
)
def test_a_mistake_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RewardConfig.model_validate({"functions": [{"target": "gsm8k"}], **changes})


def test_a_function_is_called_by_its_name_or_by_the_last_part_of_its_target() -> None:
    assert FunctionConfig(target="gsm8k").label == "gsm8k"
    assert FunctionConfig(target="./a/b.py:grade").label == "grade"
    assert FunctionConfig(target="./a/b.py:grade", name="mine").label == "mine"
