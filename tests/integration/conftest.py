"""A tiny random model that all integration tests share, and configs that use it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services import faults
from services.config import Config
from trainer.small.tiny import TinyShape, make_tiny_qwen3

torch.set_num_threads(1)
SHAPE = TinyShape(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_positions=64,
    initializer_range=0.3,
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), seed=1, shape=SHAPE)


@pytest.fixture
def make_config(model_folder: Path, tmp_path: Path) -> Callable[..., Config]:
    """make_config(reward={...}): a small run; each argument is merged into the section of that name."""

    def make(**sections: dict[str, Any]) -> Config:
        values: dict[str, dict[str, Any]] = {
            "run": {"name": "t", "folder": str(tmp_path), "num_steps": 2, "prompts_per_step": 2, "group_size": 2},
            "data": {"type": "arithmetic", "size": 50},
            "rollout": {"model": str(model_folder), "max_num_seqs": 8, "max_model_len": 32, "threads": 1},
            "reward": {"functions": [{"target": "arithmetic"}]},
            "trainer": {"model": str(model_folder), "threads": 1, "max_tokens_per_microbatch": 256},
            "push": {"bucket_mib": 0.01, "deadline_seconds": 10.0},
            "conductor": {"heartbeat_seconds": 0.2},
        }
        values["rollout"]["sampling"] = {"max_tokens": 5}
        for name, section in sections.items():
            values[name] = values.get(name, {}) | section
        return Config.model_validate(values)

    return make


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    yield
    faults.arm("")
