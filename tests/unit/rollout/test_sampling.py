"""Sampling of one token a row: the distribution, its logprobs, and seeds that fix every draw."""

import math

import pytest
import torch

from rollout.sampling import SamplingParams, sample, uniforms


def draw(logits: list[float], *, u: float, **settings: object) -> tuple[int, float]:
    """One draw from one row, by the path of per-row parameters when filters are given."""
    filters = {name: torch.tensor([value]) for name, value in settings.items() if name.endswith("_B")}
    token_B, logprob_B = sample(
        torch.tensor([logits]),
        uniform_B=torch.tensor([u]),
        temperature=settings.get("temperature", 1.0),  # type: ignore[arg-type]
        **filters,
    )
    return int(token_B), float(logprob_B)


def logits_of(*probabilities: float) -> list[float]:
    return [math.log(one) for one in probabilities]


def test_uniforms_are_the_top_bits_of_the_published_splitmix64_outputs() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # seed 1234567
    got = uniforms(torch.full((3,), 1234567), index_B=torch.arange(3))
    assert got.tolist() == [(one >> 40) / 2**24 for one in published]


def test_uniforms_are_spread_evenly_and_below_one() -> None:
    got = uniforms(torch.arange(4096), index_B=torch.zeros(4096, dtype=torch.int64))
    assert got.min() >= 0 and got.max() < 1
    assert torch.histc(got, bins=8, min=0, max=1).sub(512).abs().max() < 100


def test_the_token_is_where_the_cumulative_distribution_passes_u() -> None:
    logits = logits_of(0.2, 0.5, 0.3)
    assert [draw(logits, u=u)[0] for u in (0.0, 0.19, 0.21, 0.69, 0.71, 0.9999999)] == [0, 0, 1, 1, 2, 2]
    assert draw(logits, u=0.5)[1] == pytest.approx(math.log(0.5), abs=1e-6)


def test_temperature_sharpens_the_distribution_that_the_logprob_is_taken_from() -> None:
    # At temperature 1/2 the probabilities are squared: 0.04 : 0.25 : 0.09 of 0.38.
    token, logprob = draw(logits_of(0.2, 0.5, 0.3), u=0.5, temperature=0.5)
    assert token == 1
    assert logprob == pytest.approx(math.log(0.25 / 0.38), abs=1e-6)


def test_temperature_zero_takes_the_best_token_with_the_plain_logprob() -> None:
    token, logprob = draw(logits_of(0.2, 0.5, 0.3), u=0.99, temperature=0.0)
    assert token == 1
    assert logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_top_k_keeps_the_k_best_and_renormalises() -> None:
    got = [draw(logits_of(0.2, 0.5, 0.3), u=u, top_k_B=2, top_p_B=1.0) for u in (0.0, 0.62, 0.63, 0.9999999)]
    assert [token for token, _ in got] == [1, 1, 2, 2]
    assert got[0][1] == pytest.approx(math.log(0.5 / 0.8), abs=1e-6)


def test_among_equal_logits_top_k_keeps_the_lower_token_ids() -> None:
    got = {draw([0.0, 0.0, 0.0, 0.0], u=u, top_k_B=2, top_p_B=1.0)[0] for u in (0.0, 0.4, 0.6, 0.9999999)}
    assert got == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = logits_of(0.1, 0.5, 0.3, 0.1)
    kept = {draw(logits, u=u / 100, top_k_B=-1, top_p_B=0.7)[0] for u in range(100)}
    assert kept == {1, 2}
    assert {draw(logits, u=u / 100, top_k_B=-1, top_p_B=0.2)[0] for u in range(100)} == {1}


def test_top_p_counts_the_mass_that_top_k_has_left() -> None:
    # top_k 2 leaves 0.5 and 0.3, that is 0.625 and 0.375: 0.6 is reached by the first alone.
    assert {draw(logits_of(0.2, 0.5, 0.3), u=u / 50, top_k_B=2, top_p_B=0.6)[0] for u in range(50)} == {1}


def test_rows_of_different_parameters_are_each_drawn_by_their_own() -> None:
    logits_BV = torch.tensor([logits_of(0.2, 0.5, 0.3)] * 3)
    token_B, logprob_B = sample(
        logits_BV,
        uniform_B=torch.tensor([0.99, 0.99, 0.1]),
        temperature=torch.tensor([0.0, 1.0, 0.5]),
        top_k_B=torch.tensor([1, -1, -1]),
        top_p_B=torch.tensor([1.0, 1.0, 1.0]),
    )
    assert token_B.tolist() == [1, 2, 0]
    assert logprob_B.exp().tolist() == pytest.approx([0.5, 0.3, 0.04 / 0.38], abs=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(temperature=-1.0),
        dict(temperature=math.nan),
        dict(top_p=0.0),
        dict(top_k=-2),
        dict(max_tokens=0),
        dict(stop=("",)),
    ],
)
def test_impossible_parameters_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        SamplingParams(**({"max_tokens": 4} | wrong))  # type: ignore[arg-type]
