"""The learning-rate schedule and the clipped update, against numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn

from trainer.configs.update import OptimizerConfig
from trainer.optimizer import build_optimizer, learning_rate, update


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.0, 0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        (
            "cosine",
            [0.0, 0.5, 1.0, 0.1 + 0.9 * (0.5 + math.sqrt(0.125)), 0.55, 0.1 + 0.9 * (0.5 - math.sqrt(0.125)), 0.1],
        ),
    ],
)
def test_warm_up_then_decay_to_the_floor(schedule: str, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, total_steps=6, min_lr_ratio=0.1, schedule=schedule)  # type: ignore[arg-type]
    assert [learning_rate(position, config) for position in range(len(expected))] == pytest.approx(expected)


def test_without_warm_up_the_rate_is_constant_from_the_first_step() -> None:
    assert {learning_rate(position, OptimizerConfig(lr=0.3)) for position in range(5)} == {0.3}


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_told() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    seen = []
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))  # type: ignore[union-attr]
    assert update(optimizer, 0.0, lr=0.1, max_grad_norm=1.0) == (5.0, True)
    torch.testing.assert_close(seen[0], torch.tensor([[0.6, 0.8]]))
    assert model.weight.grad is None


@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 0.0), (math.inf, 0.0), (1.0, math.nan)])
def test_an_update_that_is_not_finite_is_left_out(gradient: float, loss: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = torch.tensor([[gradient]])
    optimizer = build_optimizer(model, OptimizerConfig())
    assert update(optimizer, loss, lr=0.1, max_grad_norm=1.0)[1] is False
    assert torch.equal(model.weight, before) and not optimizer.state and model.weight.grad is None
