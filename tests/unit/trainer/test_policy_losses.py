"""Policy losses beside clipped PPO: hand-computed tokens, and each against plain Python. B samples, R tokens."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.losses import LOSSES, Denominators, LossInputs, LossOptions
from trainer.metrics import Tally

Rows = list[list[float]]
OPTIONS = LossOptions(clip_low=0.2, clip_high=0.28, dro_beta=0.3, tau_negative=1.5)


def one_token(ratio: float, advantage: float, *, old: float = -1.0) -> LossInputs:
    return LossInputs(
        logprobs_BR=torch.tensor([[old + math.log(ratio)]], dtype=torch.float64, requires_grad=True),
        old_logprobs_BR=torch.tensor([[old]], dtype=torch.float64),
        behaviour_logprobs_BR=torch.tensor([[old]], dtype=torch.float64),
        advantages_BR=torch.tensor([[advantage]], dtype=torch.float64),
        mask_BR=torch.ones(1, 1, dtype=torch.float64),
        denominators=Denominators(tokens=1, sequences=1, samples=1, width=1),
    )


def drawn(seed: int, *, samples: int = 5, width: int = 4) -> LossInputs:
    """Float64 rows with ratios on both sides of every clip, and one sample in which no token counts."""
    generator = torch.Generator().manual_seed(seed)
    old_BR, behaviour_BR = -2 * torch.rand(2, samples, width, generator=generator, dtype=torch.float64) - 0.5
    moved_BR = 0.4 * torch.randn(samples, width, generator=generator, dtype=torch.float64)
    mask_BR = (torch.rand(samples, width, generator=generator) < 0.7).double()
    mask_BR[0] = 0
    mask_BR[1:, 0] = 1
    return LossInputs(
        logprobs_BR=(old_BR + moved_BR).clamp(max=-0.05).requires_grad_(),
        old_logprobs_BR=old_BR,
        behaviour_logprobs_BR=behaviour_BR,
        advantages_BR=torch.randn(samples, width, generator=generator, dtype=torch.float64),
        mask_BR=mask_BR,
        denominators=counts(mask_BR),
    )


def counts(mask_BR: Tensor) -> Denominators:
    return Denominators(
        tokens=float(mask_BR.sum()),
        sequences=float(mask_BR.any(-1).sum()),
        samples=float(len(mask_BR)),
        width=float(mask_BR.shape[1]),
    )


def told(name: str, inputs: LossInputs, options: LossOptions = OPTIONS) -> dict[str, float]:
    tally = Tally()
    tally.add(LOSSES[name](inputs, options).metrics, tokens=float(inputs.mask_BR.sum()))
    return tally.result(updates=1)


# By hand, one token.


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "loss", "gradient", "side"),
    [
        ("gspo", 1.1, 2.0, -2.2, -2.2, None),
        ("gspo", 1.5, 2.0, -2.56, 0.0, "high"),  # -A * 1.28
        ("gspo", 0.5, -2.0, 1.6, 0.0, "low"),  # -A * 0.8
        ("gspo", 4.0, -2.0, 8.0, 8.0, None),  # no dual clip
        ("cispo", 1.5, 2.0, -1.28 * 2 * (math.log(1.5) - 1), -2.56, "high"),
        ("cispo", 0.5, -2.0, 0.8 * 2 * (math.log(0.5) - 1), 1.6, "low"),
        ("gpg", 1.5, 2.0, -2 * (math.log(1.5) - 1), -2.0, None),
        ("sapo", 1.0, 2.0, -2 * 0.5 * 4, -2.0, None),  # slope of the gate on policy: A * r
        ("sapo", 1.0, -2.0, 2 * 0.5 * 4 / 1.5, 2.0, None),
        ("geo_mean", 1.2, 2.0, -2.4, -2.4, None),  # log 1.2 < 0.28
        ("geo_mean", 2.0, 2.0, -2 * math.exp(0.28), 0.0, "high"),
        ("geo_mean", 0.5, -2.0, 2 * math.exp(-0.2), 0.0, "low"),
        ("dro", 1.5, 2.0, -2 * (math.log(1.5) - 1) + 0.15 * math.log(1.5) ** 2, -2 + 0.3 * math.log(1.5), None),
        ("dppo_tv", 1.5, 2.0, -2 * 1.5 * (math.log(1.5) - 1), -3.0, None),  # p moves by 0.18 <= 0.28
        ("dppo_tv", 2.0, 2.0, 0.0, 0.0, "high"),  # by 0.37
        ("dppo_tv", 0.4, -2.0, 0.0, 0.0, "low"),  # by -0.22
        ("dppo_tv", 0.4, 2.0, -2 * 0.4 * (math.log(0.4) - 1), -0.8, None),
        ("dppo_kl", 1.5, 2.0, -2 * 1.5 * (math.log(1.5) - 1), -3.0, None),  # 0.0682 nats
        ("dppo_kl", 2.4, 2.0, 0.0, 0.0, "high"),  # 0.744 nats
        ("dppo_kl", 0.2, -2.0, 0.0, 0.0, "low"),  # 0.350 nats
        ("dppo_kl", 0.2, 2.0, -2 * 0.2 * (math.log(0.2) - 1), -0.4, None),
    ],
)
def test_one_token_by_hand(
    name: str, ratio: float, advantage: float, loss: float, gradient: float, side: str | None
) -> None:
    inputs = one_token(ratio, advantage)
    found = LOSSES[name](inputs, OPTIONS).loss
    (slope,) = torch.autograd.grad(found, inputs.logprobs_BR)
    assert found.item() == pytest.approx(loss, abs=1e-7)
    assert slope.item() == pytest.approx(gradient, abs=1e-7)
    fractions = told(name, inputs)
    assert {side for side in ("low", "high") if fractions.get(f"clip_fraction_{side}")} == {side} - {None}


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_truncates_the_weight_of_a_rare_token_that_ppo_would_clip(name: str) -> None:
    inputs = one_token(50.0, 2.0, old=-7.0)
    found = LOSSES[name](inputs, OPTIONS).loss
    assert found.item() == pytest.approx(-2 * 3 * (math.log(50) - 7))
    assert told(name, inputs)["clip_fraction_dual"] == 1.0
    assert told("vanilla", inputs)["clip_fraction_high"] == 1.0


def test_gspo_gives_each_token_the_ratio_of_its_sample() -> None:
    inputs = drawn(0, samples=2, width=3)
    inputs = replace(
        inputs,
        logprobs_BR=torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True),
        old_logprobs_BR=torch.tensor([[-1.3, -1.9, -1.0], [-1.0, -31.0, -1.0]], dtype=torch.float64),
        advantages_BR=torch.ones(2, 3, dtype=torch.float64),
        mask_BR=torch.tensor([[1, 1, 0], [0, 1, 0]], dtype=torch.float64),
        denominators=Denominators(tokens=3, sequences=2, samples=2, width=3),
    )
    found = LOSSES["gspo"](inputs, replace(OPTIONS, clip_high=1e9)).loss
    ratio = math.exp((0.3 - 0.1) / 2)
    assert found.item() == pytest.approx(-(2 * ratio + math.exp(10)) / 3)  # the second sample is bounded at e^10
    (slope_BR,) = torch.autograd.grad(found, inputs.logprobs_BR)
    assert slope_BR[0].tolist() == pytest.approx([-ratio / 3, -ratio / 3, 0])


def test_sapo_averages_samples_and_geo_mean_ignores_the_aggregation() -> None:
    inputs = drawn(3)
    for name in ("sapo", "geo_mean"):
        found = {
            mode: LOSSES[name](inputs, replace(OPTIONS, aggregation=mode)).loss.item()
            for mode in ("token-mean", "token-sum", "seq-mean-token-mean")
        }
        assert len(set(found.values())) == 1


def test_dro_without_its_beta_is_refused() -> None:
    with pytest.raises(ValueError, match="dro_beta > 0, not None"):
        LOSSES["dro"](one_token(1.0, 1.0), LossOptions())


# Against plain Python. `lp` carries the gradient, `sg` is the same numbers where the formula stops it.


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def plain_gspo(lp: float, sg: float, old: float, a: float, mean: float, o: LossOptions) -> float:
    s = math.exp(min(lp - sg + mean, 10))
    return max(-a * s, -a * clamp(s, 1 - o.clip_low, 1 + o.clip_high))


def plain_sapo(lp: float, sg: float, old: float, a: float, mean: float, o: LossOptions) -> float:
    tau = o.tau_positive if a > 0 else o.tau_negative
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(clamp(lp - old, -20, 20)) - 1)))


def plain_cispo(lp: float, sg: float, old: float, a: float, mean: float, o: LossOptions) -> float:
    return -clamp(math.exp(clamp(sg - old, -20, 20)), 1 - o.clip_low, 1 + o.clip_high) * a * lp


def plain_gpg(lp: float, sg: float, old: float, a: float, mean: float, o: LossOptions) -> float:
    return -lp * a


def plain_dppo_tv(lp: float, sg: float, old: float, a: float, mean: float, o: LossOptions) -> float:
    moved = math.exp(sg) - math.exp(old)
    valid = moved <= o.clip_high if a > 0 else moved >= -o.clip_low
    return -a * min(math.exp(clamp(sg - old, -20, 20)), o.clip_dual) * lp * valid


def plain_dppo_kl(lp: float, sg: float, old: float, a: float, mean: float, o: LossOptions) -> float:
    p, q = math.exp(sg), math.exp(old)
    kl = q * (old - sg) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    valid = (kl <= o.clip_high or p <= q) if a > 0 else (kl <= o.clip_low or p >= q)
    return -a * min(math.exp(clamp(sg - old, -20, 20)), o.clip_dual) * lp * valid


def plain_dro(lp: float, sg: float, old: float, a: float, mean: float, o: LossOptions) -> float:
    assert o.dro_beta
    return -(lp * a - o.dro_beta / 2 * (lp - old) ** 2)


PLAIN: dict[str, Callable[..., float]] = {
    "gspo": plain_gspo,
    "sapo": plain_sapo,
    "cispo": plain_cispo,
    "gpg": plain_gpg,
    "dppo_tv": plain_dppo_tv,
    "dppo_kl": plain_dppo_kl,
    "dro": plain_dro,
}


def plain_loss(name: str, logprobs: Rows, stopped: Rows, inputs: LossInputs, o: LossOptions) -> float:
    """token-mean, but for sapo (mean over samples of token means) and geo_mean (of its own kind)."""
    old, advantages = inputs.old_logprobs_BR.tolist(), inputs.advantages_BR.tolist()
    total, tokens, samples = 0.0, 0, 0
    for i, row in enumerate(inputs.mask_BR.tolist()):
        counted = [t for t, m in enumerate(row) if m]
        if name == "geo_mean":
            total += plain_geo_mean([(logprobs[i][t] - old[i][t], advantages[i][t]) for t in counted], o)
        elif counted:
            mean = sum(stopped[i][t] - old[i][t] for t in counted) / len(counted)
            part = sum(
                PLAIN[name](logprobs[i][t], stopped[i][t], old[i][t], advantages[i][t], mean, o) for t in counted
            )
            total += part / len(counted) if name == "sapo" else part
            tokens, samples = tokens + len(counted), samples + 1
    return total / {"geo_mean": len(old), "sapo": samples}.get(name, tokens)


def plain_geo_mean(tokens: list[tuple[float, float]], o: LossOptions) -> float:
    if not tokens:
        return 0.0
    pulled = [min(ratio, o.clip_high) if a > 0 else max(ratio, -o.clip_low) for ratio, a in tokens]
    return -sum(a for _, a in tokens) / len(tokens) * math.exp(sum(pulled) / len(tokens))


@pytest.mark.parametrize("name", [*PLAIN, "geo_mean"])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_value_and_gradient_are_those_of_plain_python(name: str, seed: int) -> None:
    inputs = drawn(seed)
    found = LOSSES[name](inputs, OPTIONS).loss
    (slope_BR,) = torch.autograd.grad(found, inputs.logprobs_BR)
    stopped: Rows = inputs.logprobs_BR.tolist()
    assert found.item() == pytest.approx(plain_loss(name, stopped, stopped, inputs, OPTIONS), abs=1e-7)
    for i, row in enumerate(stopped):
        for t in range(len(row)):
            assert slope_BR[i, t].item() == pytest.approx(difference(name, i, t, stopped, inputs), abs=1e-6)


def difference(name: str, i: int, t: int, stopped: Rows, inputs: LossInputs, step: float = 1e-6) -> float:
    """Central difference of the plain loss in one logprob, what the formula stops held fast."""
    ends = []
    for sign in (1, -1):
        moved = [list(row) for row in stopped]
        moved[i][t] += sign * step
        ends.append(plain_loss(name, moved, stopped, inputs, OPTIONS))
    return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("name", [*PLAIN, "geo_mean"])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31), split=st.integers(1, 4))
def test_micro_batches_add_up_and_masked_tokens_never_matter(name: str, seed: int, split: int) -> None:
    inputs = drawn(seed)
    noisy = cut(inputs, slice(None), noise_BR=2 * (1 - inputs.mask_BR))
    whole, parts = LOSSES[name](inputs, OPTIONS), (slice(0, split), slice(split, None))
    added = sum(LOSSES[name](cut(inputs, part), OPTIONS).loss for part in parts)
    torch.testing.assert_close(added, whole.loss)
    torch.testing.assert_close(LOSSES[name](noisy, OPTIONS).loss, whole.loss)


def cut(inputs: LossInputs, part: slice, *, noise_BR: Tensor | float = 0.0) -> LossInputs:
    changed: dict[str, Any] = {
        "logprobs_BR": (inputs.logprobs_BR - noise_BR)[part],
        "old_logprobs_BR": inputs.old_logprobs_BR[part],
        "behaviour_logprobs_BR": inputs.behaviour_logprobs_BR[part],
        "advantages_BR": (inputs.advantages_BR + noise_BR)[part],
        "mask_BR": inputs.mask_BR[part],
    }
    return replace(inputs, **changed)


def test_on_policy_every_ratio_loss_has_the_plain_policy_gradient() -> None:
    inputs = drawn(7)
    inputs = replace(inputs, logprobs_BR=inputs.old_logprobs_BR.clone().requires_grad_())
    slopes = {
        name: torch.autograd.grad(LOSSES[name](inputs, OPTIONS).loss, inputs.logprobs_BR)[0]
        for name in ("vanilla", "gspo", "cispo", "gpg", "dppo_tv", "dppo_kl", "dro")
    }
    for slope_BR in slopes.values():
        torch.testing.assert_close(slope_BR, slopes["gpg"])


def test_a_correction_weighs_tokens_and_geo_mean_takes_its_geometric_mean() -> None:
    inputs = drawn(11)
    weights_BR = torch.full_like(inputs.mask_BR, 1.7) * inputs.mask_BR
    for name in LOSSES:
        plain, weighed = (LOSSES[name](replace(inputs, weights_BR=w), OPTIONS).loss for w in (None, weights_BR))
        if name not in {"clip_cov"}:  # draws anew
            assert weighed.item() == pytest.approx(1.7 * plain.item())
    two = torch.tensor([[2.0, 8.0]], dtype=torch.float64)
    ones = torch.ones_like(two)
    pair = replace(one_token(1.0, 1.0), logprobs_BR=ones, old_logprobs_BR=ones, advantages_BR=ones, mask_BR=ones)
    assert LOSSES["geo_mean"](replace(pair, weights_BR=two), OPTIONS).loss.item() == pytest.approx(-4)


# The two that choose tokens by their covariance.


def covariances(inputs: LossInputs) -> dict[tuple[int, int], float]:
    """Of each counted token, in plain Python."""
    lp, a, mask = inputs.logprobs_BR.tolist(), inputs.advantages_BR.tolist(), inputs.mask_BR.tolist()
    places = [(i, t) for i, row in enumerate(mask) for t, m in enumerate(row) if m]
    mean_lp, mean_a = (sum(x[i][t] for i, t in places) / len(places) for x in (lp, a))
    return {(i, t): (a[i][t] - mean_a) * (lp[i][t] - mean_lp) for i, t in places}


@pytest.mark.parametrize("share", [1e-6, 0.4, 1.0])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_kl_cov_punishes_the_tokens_of_highest_covariance(share: float, seed: int) -> None:
    inputs = drawn(seed)
    found = covariances(inputs)
    num = max(1, int(share * len(found)))
    chosen = sorted(found, key=lambda place: -found[place])[:num]
    lp, old, a = (x.tolist() for x in (inputs.logprobs_BR, inputs.old_logprobs_BR, inputs.advantages_BR))
    total = sum(-a[i][t] * math.exp(lp[i][t] - old[i][t]) for i, t in found)
    total += sum(0.7 * abs(lp[i][t] - old[i][t]) for i, t in chosen)
    options = LossOptions(kl_cov_share=share, kl_cov_coef=0.7)
    assert LOSSES["kl_cov"](inputs, options).loss.item() == pytest.approx(total / len(found), abs=1e-7)
    assert told("kl_cov", inputs, options)["covariance_fraction"] == pytest.approx(num / len(found))


@pytest.mark.parametrize("share", [1e-6, 0.3, 1.0])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_clip_cov_silences_a_random_part_of_the_free_tokens_within_the_bounds(share: float, seed: int) -> None:
    options = replace(OPTIONS, clip_cov_share=share, clip_cov_low=-0.1, clip_cov_high=0.4)
    inputs = replace(drawn(seed), generator=torch.Generator().manual_seed(seed))
    found = covariances(inputs)
    lp, old, a = (x.tolist() for x in (inputs.logprobs_BR, inputs.old_logprobs_BR, inputs.advantages_BR))
    losses, free = {}, []
    for place, covariance in found.items():
        i, t = place
        ratio = math.exp(lp[i][t] - old[i][t])
        plain, clipped = -a[i][t] * ratio, -a[i][t] * clamp(ratio, 0.8, 1.28)
        losses[place] = max(plain, clipped)
        if clipped <= plain and -0.1 < covariance < 0.4:
            free.append(place)
    order = torch.randperm(len(free), generator=torch.Generator().manual_seed(seed)).tolist()
    silent = [free[k] for k in order[: max(1, int(share * len(found)))]]
    expected = (sum(losses.values()) - sum(losses[place] for place in silent)) / len(found)
    outputs = LOSSES["clip_cov"](inputs, options)
    (slope_BR,) = torch.autograd.grad(outputs.loss, inputs.logprobs_BR)
    assert outputs.loss.item() == pytest.approx(expected, abs=1e-7)
    assert all(slope_BR[place] == 0 for place in silent)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariance_losses_have_the_gradient_of_finite_differences(name: str) -> None:
    inputs = drawn(5)
    options = replace(OPTIONS, clip_cov_low=-9, clip_cov_high=9, clip_cov_share=0.3, kl_cov_share=0.3)

    def loss(logprobs_BR: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return LOSSES[name](replace(inputs, logprobs_BR=logprobs_BR, generator=generator), options).loss

    assert torch.autograd.gradcheck(loss, (inputs.logprobs_BR,))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_micro_batch_without_a_counted_token_has_no_loss(name: str) -> None:
    inputs = drawn(2)
    empty = replace(inputs, mask_BR=torch.zeros_like(inputs.mask_BR))
    assert LOSSES[name](empty, OPTIONS).loss.item() == 0
