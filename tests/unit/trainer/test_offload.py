"""What lies in host memory between steps and updates, and that nobody can tell it from the results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.trainer.test_step import tiny_model, trajectories
from trainer.checkpoints.restore import restore
from trainer.checkpoints.snapshot import snapshot
from trainer.checkpoints.store import CheckpointStore
from trainer.config import AlgorithmConfig, CheckpointConfig, OffloadMode, TrainerConfig
from trainer.configs.update import OptimizerConfig
from trainer.model.offload import Offload
from trainer.optimizer import build_optimizer
from trainer.step import Learner

torch.set_num_threads(1)
MODES: tuple[OffloadMode, ...] = ("none", "optimizer", "all")


def learner(mode: OffloadMode, *, model: str = "tiny") -> Learner:
    config = TrainerConfig(
        model=model,
        device="cpu",
        offload=mode,
        algorithm=AlgorithmConfig(epochs=2, minibatches=2),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    return Learner(tiny_model(), config)


def trained(one: Learner, steps: Sequence[int]) -> list[dict[str, float]]:
    figures = []
    for step in steps:
        figures.append(dict(one.train(trajectories(step), step=step, policy_version=step - 1)))
        one.rest()
    return figures


def state_of(one: Learner) -> dict[str, Tensor]:
    taken = snapshot_of(one)
    return {f"{part}:{name}": shard.block for part, shards in taken.parts.items() for name, shard in shards.items()}


def snapshot_of(one: Learner) -> Any:
    return snapshot(one, step=3, policy_version=3)


@pytest.fixture
def model_folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize("mode", ["optimizer", "all"])
def test_training_gives_the_same_bits(mode: OffloadMode, model_folder: str) -> None:
    stays, leaves = learner("none", model=model_folder), learner(mode, model=model_folder)
    assert trained(stays, (1, 2, 3)) == trained(leaves, (1, 2, 3))
    expected, found = state_of(stays), state_of(leaves)
    assert found.keys() == expected.keys() and any("/exp_avg" in name for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_of_what_has_left_goes_on_as_if_it_had_stayed(model_folder: str, tmp_path: Path) -> None:
    one = learner("all", model=model_folder)
    trained(one, (1, 2, 3))
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(), incarnation=1)
    path = store.write(snapshot_of(one))
    other = learner("all", model=model_folder)
    trained(other, (9,))  # it has places in host memory, of other weights
    restore(path, other)
    other.rest()
    assert trained(one, (4,)) == trained(other, (4,))
    expected = state_of(one)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state_of(other).items())


@pytest.mark.parametrize("mode", MODES)
def test_what_leaves_lies_in_one_place_of_host_memory_for_good(mode: OffloadMode) -> None:
    model = tiny_model()
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    offload = Offload(model, optimizer, mode)
    places = []
    for _ in range(2):
        offload.bring_weights()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with offload.moments():
            optimizer.step()
            inside = moments_at(optimizer)
        outside = moments_at(optimizer)
        assert (outside == inside) == (mode == "none")
        at_work = weights_at(model)
        offload.leave()
        assert (weights_at(model) == at_work) == (mode != "all")
        places.append((outside, weights_at(model)))
    assert places[0] == places[1]


def weights_at(model: torch.nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def moments_at(optimizer: torch.optim.Optimizer) -> list[int]:
    return [value.data_ptr() for states in optimizer.state.values() for value in states.values()]
