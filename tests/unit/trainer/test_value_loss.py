"""The critic's loss by hand, by finite differences, and over micro-batches. B samples, R response tokens."""

import pytest
import torch
from torch import Tensor

from trainer.configs.update import AGGREGATIONS
from trainer.losses.types import Denominators
from trainer.losses.value import value_loss
from trainer.metrics import Tally

ONE = Denominators(tokens=1, sequences=1, samples=1, width=1)


def number(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0, 0.0),
        (1.4, 1.0, 3.0, 0.5 * 1.8**2, 0.0, 1.0),  # held at 1.2: (1.2 - 3)^2
        (0.0, 1.0, 3.0, 4.5, -3.0, 0.0),  # the free loss is the worse one
        (1.4, 1.0, 0.0, 0.98, 1.4, 0.0),
    ],
)
def test_one_token_by_hand(
    value: float, old: float, target: float, loss: float, gradient: float, clipped: float
) -> None:
    values_BR = number(value).requires_grad_()
    found = value_loss(
        values_BR, number(old), number(target), number(1), clip=0.2, aggregation="token-mean", denominators=ONE
    )
    (slope,) = torch.autograd.grad(found.loss, values_BR)
    assert (found.loss.item(), slope.item()) == pytest.approx((loss, gradient), abs=1e-12)
    tally = Tally()
    tally.add(found.metrics, tokens=1)
    assert tally.result(updates=1) == pytest.approx(
        {"value_loss": loss, "value_clip_fraction": clipped, "value_mean": value}
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_are_exact_micro_batches_add_up_and_padding_never_matters(aggregation: str) -> None:
    generator = torch.Generator().manual_seed(3)
    values_BR, old_BR, returns_BR = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    mask_BR = (torch.rand(6, 4, generator=generator) < 0.7).double()
    counts = Denominators(tokens=float(mask_BR.sum()), sequences=float(mask_BR.any(-1).sum()), samples=6.0, width=4.0)

    def loss(values_BR: Tensor, part: slice = slice(None)) -> Tensor:
        rows = (old_BR[part], returns_BR[part], mask_BR[part])
        return value_loss(values_BR[part], *rows, clip=0.5, aggregation=aggregation, denominators=counts).loss

    assert torch.autograd.gradcheck(loss, (values_BR.clone().requires_grad_(),))
    whole = loss(values_BR)
    torch.testing.assert_close(loss(values_BR, slice(0, 2)) + loss(values_BR, slice(2, None)), whole)
    torch.testing.assert_close(loss(values_BR + 9 * (1 - mask_BR)), whole)
