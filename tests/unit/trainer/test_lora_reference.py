"""The reference of a LoRA run is its model with the adapter off: the figures are those of a reference service."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from tests.unit.trainer.scenes import SHAPE
from trainer.adapters.lora import attach_adapter
from trainer.batch import Trajectory
from trainer.config import AlgorithmConfig, TrainerConfig
from trainer.configs.lora import LoraConfig
from trainer.configs.update import OptimizerConfig
from trainer.model.load import load_model
from trainer.reference import ReferencePolicy
from trainer.small.tiny import make_tiny_qwen3
from trainer.step import Learner

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), seed=1, shape=SHAPE)


def make_learner(start: Path, kl_use: Literal["loss", "reward"], lora: LoraConfig | None) -> Learner:
    config = TrainerConfig(
        model=str(start),
        device="cpu",
        lora=lora,
        algorithm=AlgorithmConfig(kl_use=kl_use, kl_coef=0.1),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    model = load_model(str(start), dtype="float32", attn_implementation="sdpa", device="cpu")
    return Learner(model if lora is None else attach_adapter(model, lora), config)


def batch(step: int) -> list[Trajectory]:
    draw = np.random.default_rng(step)
    return [
        Trajectory(
            sample=str(index),
            group=index // 4,
            prompt_ids=draw.integers(0, 11, 3).astype(np.int32),
            response_ids=draw.integers(0, 11, 3 + index % 2).astype(np.int32),
            behaviour_logprobs=np.full(3 + index % 2, -2.4, np.float32),
            reward=float(draw.random()),
            spans=((step, 3 + index % 2),),
            stop_reason="stop",
        )
        for index in range(8)
    ]


def referred(start: Path, trajectories: list[Trajectory]) -> list[Trajectory]:
    """As a reference service would answer."""
    model = load_model(str(start), dtype="float32", attn_implementation="sdpa", device="cpu")
    policy = ReferencePolicy(model, 64)
    found = policy.logprobs([one.prompt_ids for one in trajectories], [one.response_ids for one in trajectories])
    return [replace(one, reference_logprobs=values) for one, values in zip(trajectories, found, strict=True)]


@pytest.mark.parametrize("kl_use", ["loss", "reward"])
def test_the_figures_are_those_of_a_reference_service(start: Path, kl_use: Literal["loss", "reward"]) -> None:
    own, served = (make_learner(start, kl_use, LoraConfig(rank=4)) for _ in range(2))
    name = "kl" if kl_use == "loss" else "kl_in_reward"
    for step in (1, 2, 3):
        found = own.train(batch(step), step=step, policy_version=step)
        expected = served.train(referred(start, batch(step)), step=step, policy_version=step)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert (found[name] == pytest.approx(0, abs=1e-6)) is (step == 1), "then the policy leaves its reference"


def test_without_an_adapter_missing_reference_logprobs_are_an_error(start: Path) -> None:
    with pytest.raises(ValueError, match="needs reference logprobs"):
        make_learner(start, "loss", None).train(batch(1), step=1, policy_version=1)
