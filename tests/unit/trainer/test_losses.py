"""Losses, KL estimators and aggregations against numbers worked out by hand, in float64. B samples, R tokens."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.config import POLICY_LOSSES
from trainer.configs.kl import KL_ESTIMATORS
from trainer.configs.update import AGGREGATIONS
from trainer.corrections import effective_sample_share, truncated_weights
from trainer.losses import LOSSES, Denominators, LossInputs, LossOptions
from trainer.losses.aggregate import aggregate
from trainer.losses.kl import kl_penalty
from trainer.losses.objective import objective
from trainer.metrics import Tally


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def counts(mask_BR: Tensor) -> Denominators:
    return Denominators(
        tokens=float(mask_BR.sum()),
        sequences=float(mask_BR.any(-1).sum()),
        samples=float(len(mask_BR)),
        width=float(mask_BR.shape[1]),
    )


def one_token(ratio: float, advantage: float, *, weight: float = 1.0, **more: Any) -> LossInputs:
    """A single token with this PPO ratio and this proximal/behaviour weight."""
    old = -1.0
    return LossInputs(
        logprobs_BR=rows([old + math.log(ratio)]).requires_grad_(),
        old_logprobs_BR=rows([old]),
        behaviour_logprobs_BR=rows([old - math.log(weight)]),
        advantages_BR=rows([advantage]),
        mask_BR=rows([1]),
        denominators=Denominators(tokens=1, sequences=1, samples=1, width=1),
        **more,
    )


def metrics_of(inputs: LossInputs, name: str, options: LossOptions) -> dict[str, float]:
    tally = Tally()
    tally.add(LOSSES[name](inputs, options).metrics, tokens=1)
    return tally.result(updates=1)


def test_the_config_names_exactly_the_losses_that_exist() -> None:
    assert set(POLICY_LOSSES) == set(LOSSES)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.1, 2.0, -2.2, -2.2, None),
        (1.5, 2.0, -2.4, 0.0, "high"),  # -A * 1.2
        (0.5, 2.0, -1.0, -1.0, None),  # the clip never hides a loss that is worse
        (0.5, -2.0, 1.6, 0.0, "low"),  # -A * 0.8
        (1.5, -2.0, 3.0, 3.0, None),
        (4.0, -2.0, 6.0, 0.0, "dual"),  # -A * 3
    ],
)
def test_vanilla_clips_above_below_and_twice(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: str | None
) -> None:
    inputs = one_token(ratio, advantage)
    found = LOSSES["vanilla"](inputs, LossOptions())
    (slope,) = torch.autograd.grad(found.loss, inputs.logprobs_BR)
    assert found.loss.item() == pytest.approx(loss, abs=1e-12)
    assert slope.item() == pytest.approx(gradient, abs=1e-12)
    fractions = metrics_of(inputs, "vanilla", LossOptions())
    assert {side for side in ("low", "high", "dual") if fractions[f"clip_fraction_{side}"]} == {clipped} - {None}


def test_vanilla_bounds_the_log_ratio_at_twenty() -> None:
    inputs = one_token(math.exp(50), -1.0)
    assert LOSSES["vanilla"](inputs, LossOptions(clip_dual=1e12)).loss.item() == pytest.approx(math.exp(20))


@pytest.mark.parametrize(
    ("weight", "cap", "used"), [(1.5, 2.0, 1.5), (5.0, 2.0, 2.0), (5.0, None, 5.0), (0.1, 2.0, 0.1)]
)
def test_decoupled_multiplies_clipped_ppo_by_the_truncated_weight(
    weight: float, cap: float | None, used: float
) -> None:
    for ratio, advantage in ((1.1, 2.0), (1.5, 2.0), (4.0, -2.0)):
        plain = LOSSES["vanilla"](one_token(ratio, advantage), LossOptions()).loss.item()
        inputs = one_token(ratio, advantage, weight=weight)
        found = LOSSES["decoupled"](inputs, LossOptions(importance_cap=cap))
        assert found.loss.item() == pytest.approx(used * plain, abs=1e-12)
    assert metrics_of(inputs, "decoupled", LossOptions(importance_cap=cap))["importance_weight_mean"] == pytest.approx(
        used
    )


def test_decoupled_on_fresh_samples_is_vanilla() -> None:
    inputs = one_token(1.3, -0.7)
    assert (
        LOSSES["decoupled"](inputs, LossOptions()).loss.item() == LOSSES["vanilla"](inputs, LossOptions()).loss.item()
    )


def test_truncated_weights_carry_no_gradient() -> None:
    old_BR = rows([0.0]).requires_grad_()
    assert not truncated_weights(old_BR, rows([-1.0]), cap=2.0).requires_grad


def test_the_effective_sample_share_is_one_for_equal_weights_and_a_half_for_one_of_two() -> None:
    assert effective_sample_share(mean=3.0, mean_square=9.0) == 1.0
    assert effective_sample_share(mean=0.5, mean_square=0.5) == 0.5
    assert effective_sample_share(mean=0.0, mean_square=0.0) == 0.0


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5)),
        ("k1+", 0.5, 0.5),
        ("abs+", 0.5, 0.5),
        ("k2+", 0.125, 0.5),
        ("k3+", math.exp(-0.5) + 0.5 - 1, 0.5),
    ],
)
def test_kl_estimators_have_these_values_and_gradients(estimator: str, value: float, gradient: float) -> None:
    logprobs = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    kl = kl_penalty(logprobs, torch.tensor(-1.5, dtype=torch.float64), estimator=estimator)
    (slope,) = torch.autograd.grad(kl, logprobs)
    assert kl.item() == pytest.approx(value, abs=1e-12)
    assert slope.item() == pytest.approx(gradient, abs=1e-12)


def test_k3_is_bounded_at_ten_and_unknown_names_are_refused() -> None:
    assert kl_penalty(torch.tensor(-50.0), torch.tensor(0.0), estimator="k3").item() == 10.0
    assert all(kl_penalty(torch.tensor(0.0), torch.tensor(0.0), estimator=name) == 0 for name in KL_ESTIMATORS)
    with pytest.raises(ValueError, match="k9"):
        kl_penalty(torch.tensor(0.0), torch.tensor(0.0), estimator="k9")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 12 / 3),
        ("token-sum", 12),
        ("seq-mean-token-sum", 12 / 2),
        ("seq-mean-token-sum-norm", 12 / 2 / 4),
        ("seq-mean-token-mean", (6 / (2 + 1e-8) + 6 / (1 + 1e-8)) / 2),
    ],
)
def test_aggregations_leave_out_masked_tokens_and_empty_samples(mode: str, expected: float) -> None:
    values_BR = rows([2, 4, 99, 99], [99, 6, 99, 99], [99, 99, 99, 99])
    mask_BR = rows([1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0])
    found = aggregate(values_BR, mask_BR, mode=mode, denominators=counts(mask_BR))
    assert found.item() == pytest.approx(expected, abs=1e-12)


def test_the_scale_factor_takes_the_place_of_the_width() -> None:
    mask_BR = rows([1, 1])
    found = aggregate(
        rows([2, 4]), mask_BR, mode="seq-mean-token-sum-norm", denominators=counts(mask_BR), scale_factor=12
    )
    assert found.item() == 0.5
    with pytest.raises(ValueError, match="seq-max"):
        aggregate(rows([1]), rows([1]), mode="seq-max", denominators=counts(rows([1])))


def test_the_objective_adds_the_kl_and_takes_off_the_entropy() -> None:
    inputs = one_token(1.0, 2.0, reference_logprobs_BR=rows([-1.5]), entropy_BR=rows([0.7]))
    options = LossOptions(kl_loss_coef=0.1, kl_estimator="k2", entropy_coef=0.01)
    assert objective(LOSSES["vanilla"], inputs, options).loss.item() == pytest.approx(-2 + 0.1 * 0.125 - 0.007)
    assert objective(LOSSES["vanilla"], inputs, LossOptions()).loss.item() == -2.0
    with pytest.raises(ValueError, match="no reference logprobs"):
        objective(LOSSES["vanilla"], one_token(1.0, 2.0), options)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), split=st.integers(1, 5), mode=st.sampled_from(AGGREGATIONS))
def test_micro_batch_losses_add_up_and_masked_tokens_never_matter(seed: int, split: int, mode: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs_BR, old_BR, behaviour_BR, reference_BR, advantages_BR = torch.randn(
        5, 6, 4, generator=generator, dtype=torch.float64
    )
    mask_BR = (torch.rand(6, 4, generator=generator) < 0.7).double()
    options = LossOptions(aggregation=mode, kl_loss_coef=0.1)

    def loss(noise_BR: Tensor, part: slice) -> Tensor:
        inputs = LossInputs(
            logprobs_BR=(logprobs_BR + noise_BR)[part],
            old_logprobs_BR=old_BR[part],
            behaviour_logprobs_BR=behaviour_BR[part],
            advantages_BR=(advantages_BR - noise_BR)[part],
            mask_BR=mask_BR[part],
            denominators=counts(mask_BR),
            reference_logprobs_BR=reference_BR[part],
        )
        return objective(LOSSES["decoupled"], inputs, options).loss

    zero_BR = torch.zeros_like(mask_BR)
    whole = loss(zero_BR, slice(None))
    torch.testing.assert_close(loss(zero_BR, slice(0, split)) + loss(zero_BR, slice(split, None)), whole)
    torch.testing.assert_close(loss(3 * (1 - mask_BR), slice(None)), whole)
