"""A trainer of several ranks against one of one: real processes under torchrun, real collectives."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from trainer.checkpoints.trained import parts_of
from trainer.config import TrainerConfig
from trainer.configs.lora import LoraConfig
from trainer.configs.parallel import ParallelConfig
from trainer.parallel.loading import load_trained
from trainer.supervised.batch import Example
from trainer.supervised.step import SupervisedLearner

RANK_CODE = Path(__file__).with_name("learner_rank.py")
SLOW = pytest.mark.slow
Told = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def run_ranks(folder: Path, size: int, **spec: Any) -> Told:
    """Metrics of each step, and the whole weights, of a learner on `size` ranks."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += [str(RANK_CODE), json.dumps({"folder": str(folder), **spec})]
    paths = [str(RANK_CODE.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "metrics.json").read_text()), load_file(folder / "weights.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return run_ranks(tmp_path_factory.mktemp("alone") / "one", 1)


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 1), pytest.param(4, 2, marks=SLOW), (2, 0)])
def test_several_ranks_train_as_one_does(tmp_path: Path, alone: Told, size: int, replicas: int) -> None:
    compare(run_ranks(tmp_path / "many", size, parallel={"replicas": replicas}), alone)


@SLOW
def test_a_step_without_a_gradient_moves_shards_as_it_moves_whole_weights(tmp_path: Path) -> None:
    """All rewards are equal: samples are scored, none has a gradient, and what AdamW still remembers moves the rest."""
    spec = {
        "algorithm": {
            "loss": "vanilla",
            "correction": {"weights": "token"},
            "kl_use": "none",
            "kl_coef": 0,
            "entropy_coef": 0,
        },
        "rewards": [None, None, 1.0, None],
    }
    one, two = (run_ranks(tmp_path / str(size), size, **spec) for size in (1, 2))
    assert two[0][2]["samples_computed"] == 0
    compare(two, one)


@SLOW
def test_two_ranks_train_a_policy_and_its_critic_as_one_does(tmp_path: Path) -> None:
    one, two = (run_ranks(tmp_path / str(size), size, critic=True) for size in (1, 2))
    assert one[1]["head.weight"].any() and one[0][-1]["value_loss"] > 0
    compare(two, one)


def test_sharded_factors_can_be_saved_after_held_out_rows_were_judged(model_folder: Path) -> None:
    config = TrainerConfig(
        model=str(model_folder),
        device="cpu",
        lora=LoraConfig(rank=2),
        parallel=ParallelConfig(compute_dtype="bfloat16", reshard_after_forward=False),
    )
    ones = np.ones(3, np.int32)
    rows = [Example(key=str(index), prompt_ids=ones, response_ids=ones) for index in range(2)]
    model, ranks, _ = load_trained(config)
    try:
        learner = SupervisedLearner(model, config, ranks)
        learner.learn(rows)
        learner.judge(rows)
        parts = parts_of(learner)
    finally:
        dist.destroy_process_group()
    assert parts["adapter_model"] and all(isinstance(tensor, DTensor) for tensor in parts["adapter_model"].values())
    assert len(parts["optimizer"]) == 3 * len(parts["adapter_model"])


def compare(ours: Told, theirs: Told) -> None:
    assert len(ours[0]) == len(theirs[0]) == 4
    for metrics, expected in zip(ours[0], theirs[0], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert ours[1].keys() == theirs[1].keys()
    for name, tensor in theirs[1].items():
        torch.testing.assert_close(ours[1][name], tensor, rtol=0, atol=1e-6)
