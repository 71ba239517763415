"""Corrections against numbers worked out by hand, in float64, and what must not change them. B samples, R tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from tests.unit.trainer.test_mismatch import by_server, fleet
from tests.unit.trainer.test_step import learner, trained, trajectories
from trainer.batch import Trajectory, collate
from trainer.config import AlgorithmConfig
from trainer.configs.correction import REJECTION_STATISTICS, CorrectionConfig, RejectionConfig
from trainer.corrections import (
    bounded,
    correct,
    importance_weights,
    kept_by,
    normalized,
    second_moment_mask,
    statistic,
)

LN2 = math.log(2)
FIRST, SECOND = [math.log(2), math.log(4), 9.0], [math.log(0.5), 0.0, 9.0]
"""Log ratios of two samples whose third token does not count; importance ratios 2, 4 and 0.5, 1."""

CLOSE = 1e-8
"""Gradients agree so far: proximal logprobs that are computed ahead are kept in float32."""


def rows(*values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


MASK = rows([1, 1, 0], [1, 1, 0])


def weights_of(level: str, log_ratios: Tensor | None = None, mask_BR: Tensor = MASK) -> Tensor:
    behaviour_BR = rows([-1, -2, -3], [-4, -5, -6])
    old_BR = behaviour_BR + (rows(FIRST, SECOND) if log_ratios is None else log_ratios)
    return importance_weights(old_BR, behaviour_BR, mask_BR, level=level)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[2, 4, 0], [0.5, 1, 0]]),
        ("sequence", [[8, 8, 0], [0.5, 0.5, 0]]),
        ("geometric", [[math.sqrt(8), math.sqrt(8), 0], [math.sqrt(0.5), math.sqrt(0.5), 0]]),
    ],
)
def test_weights_of_a_token_a_sequence_and_its_geometric_mean(level: str, expected: list[list[float]]) -> None:
    torch.testing.assert_close(weights_of(level), rows(*expected), rtol=0, atol=1e-7)


def test_the_log_of_a_weight_is_bounded_after_the_sum() -> None:
    far = rows([15, 15, 0], [30, -29, 0])
    torch.testing.assert_close(weights_of("sequence", far)[:, 0], rows([math.exp(20), math.e])[0])
    torch.testing.assert_close(weights_of("token", far)[1, :2], rows([math.exp(20), math.exp(-20)])[0])
    with pytest.raises(ValueError, match="word"):
        weights_of("word")


@pytest.mark.parametrize(
    ("bound", "low", "high", "expected"),
    [
        ("truncate", None, 2.0, [0.25, 0.5, 2, 2]),
        ("truncate", None, None, [0.25, 0.5, 2, 5]),
        ("mask", 0.5, 2.0, [0, 0.5, 2, 0]),
        ("mask", None, 2.0, [0.25, 0.5, 2, 0]),
        ("mask", 0.5, None, [0, 0.5, 2, 5]),
    ],
)
def test_weights_are_truncated_or_masked(
    bound: str, low: float | None, high: float | None, expected: list[float]
) -> None:
    found = bounded(rows([0.25, 0.5, 2, 5]), bound=bound, low=low, high=high)
    assert found.tolist() == [expected]
    with pytest.raises(ValueError, match="clip"):
        bounded(found, bound="clip", low=low, high=high)


def test_the_normalized_mean_is_over_tokens_or_over_samples() -> None:
    weights_BR, mask_BR = rows([2, 2, 2], [8, 0, 0]), rows([1, 1, 1], [1, 0, 0])
    found, mean = normalized(weights_BR, mask_BR, level="token")
    assert mean == pytest.approx(14 / 4) and found[1, 0].item() == pytest.approx(8 / 3.5)
    found, mean = normalized(weights_BR, mask_BR, level="sequence")
    assert mean == pytest.approx(5) and found[1, 0].item() == pytest.approx(8 / 5)
    nothing = torch.zeros_like(weights_BR)
    assert normalized(nothing, mask_BR, level="token") == (nothing, 1.0)


K3 = {value: value - 1 - math.log(value) for value in (2, 4, 0.5, 1)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_k1", [[-LN2, -2 * LN2], [LN2, 0]]),
        ("token_k2", [[LN2**2 / 2, 2 * LN2**2], [LN2**2 / 2, 0]]),
        ("token_k3", [[K3[2], K3[4]], [K3[0.5], K3[1]]]),
        ("seq_sum_k1", [[-3 * LN2], [LN2]]),
        ("seq_sum_k2", [[2.5 * LN2**2], [LN2**2 / 2]]),
        ("seq_sum_k3", [[K3[2] + K3[4]], [K3[0.5]]]),
        ("seq_mean_k1", [[-1.5 * LN2], [LN2 / 2]]),
        ("seq_mean_k2", [[1.25 * LN2**2], [LN2**2 / 4]]),
        ("seq_mean_k3", [[(K3[2] + K3[4]) / 2], [K3[0.5] / 2]]),
        ("seq_max_k2", [[2 * LN2**2], [LN2**2 / 2]]),
        ("seq_max_k3", [[K3[4]], [K3[0.5]]]),
    ],
)
def test_every_statistic_has_these_values(name: str, expected: list[list[float]]) -> None:
    found = statistic(rows(FIRST, SECOND), torch.zeros(2, 3, dtype=torch.float64), MASK, name=name)
    torch.testing.assert_close(found[:, :2], rows(*expected), rtol=0, atol=2e-8)


def test_the_statistics_of_the_config_are_those_that_exist() -> None:
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    for name in REJECTION_STATISTICS:
        assert not statistic(zeros, zeros, MASK, name=name).any()
    assert len(set(REJECTION_STATISTICS)) == 11
    for name in ("seq_max_k1", "token_k4", "k1", "word_k2"):
        with pytest.raises(ValueError, match="unknown"):
            statistic(zeros, zeros, MASK, name=name)


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [
        ("token_k1", None, 2.0, [False, True, True, True, False]),
        ("token_k1", 0.9, 3.0, [False, False, True, True, True]),
        ("token_k3", None, math.log(3), [True, True, True, True, True]),
        ("token_k2", None, 0.0, [True, True, True, False, False]),
    ],
)
def test_k1_has_two_bounds_and_the_others_one(name: str, low: float | None, high: float, expected: list[bool]) -> None:
    values = rows([-math.log(3), -LN2, 0, LN2, math.log(3)])
    assert kept_by(values, name=name, low=low, high=high).tolist() == [expected]


def test_m2po_leaves_the_largest_out_until_the_mean_of_the_rest_is_below() -> None:
    old_BR, mask_BR = rows([1, -3, 9], [0, 2, 2]), rows([1, 1, 0], [1, 1, 1])  # squares 1, 9; 0, 4, 4

    def gone(threshold: float) -> list[list[bool]]:
        kept = second_moment_mask(old_BR, torch.zeros_like(old_BR), mask_BR, threshold=threshold)
        return kept.tolist()

    assert gone(3.61) == [[True, True, False], [True, True, True]]  # 18 / 5
    assert gone(3.6) == [[True, False, False], [True, True, True]]  # 9 / 4 is below, 18 / 5 is not
    assert gone(2.0) == [[True, False, False], [True, False, True]]  # 5 / 3; of equal ones the first
    assert gone(0.4) == [[False, False, False], [True, False, False]]
    assert gone(1e-9) == [[False, False, False], [True, False, False]]
    far = second_moment_mask(old_BR + 7, torch.zeros_like(old_BR), mask_BR, threshold=1e-9)
    assert far.sum() == 1, "one always stays"
    assert not second_moment_mask(old_BR, old_BR, torch.zeros_like(mask_BR), threshold=1.0).any()


# The whole batch.


def sample(log_ratios: Sequence[float], *, group: int = 0, reward: float = 0.0, versions: Sequence[int]) -> Trajectory:
    """Behaviour logprobs that are so far below proximal ones of 0."""
    length = len(log_ratios)
    return Trajectory(
        sample=f"{group}/{reward}",
        group=group,
        prompt_ids=np.ones(1, np.int32),
        response_ids=np.ones(length, np.int32),
        behaviour_logprobs=-np.array(log_ratios, np.float32),
        reward=reward,
        spans=tuple((version, 1) for version in versions),
        stop_reason="stop",
    )


def corrected(**options: Any) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    batch = [sample([LN2, 2 * LN2], versions=[3, 2]), sample([-LN2], reward=1.0, versions=[1])]
    collated = collate(batch)
    config = CorrectionConfig(**options)
    found = correct(config, collated, torch.zeros_like(collated.mask_BR), batch, policy_version=3)
    return found.mask_BR, found.weights_BR, found.metrics


def test_the_correction_of_a_batch_and_what_it_says_of_it() -> None:
    mask_BR, weights_BR, told = corrected(weights="token", reject=[{"statistic": "seq_sum_k1", "high": 4.0}])
    assert mask_BR.tolist() == [[0, 0], [1, 0]]  # 1/8 is outside [1/4, 4], 2 inside
    assert weights_BR is not None
    torch.testing.assert_close(weights_BR, torch.tensor([[2.0, 2.0], [0.5, 0.0]]))
    expected = {
        "importance_weight_mean": 1.5,
        "importance_weight_max": 2.0,
        "importance_weight_ess": 1.5**2 / (8.25 / 3),
        "importance_bounded_fraction": 1 / 3,
        "rejected_token_share": 2 / 3,
        "rejected_sample_share": 1 / 2,
        "rejected_token_share/seq_sum_k1": 2 / 3,
        "logprob_diff_mean": 4 / 3 * LN2,
        "logprob_diff_max": 2 * LN2,
        "tokens_staleness_0": 1,
        "importance_ratio_mean_staleness_1": 4,
        "ess_staleness_1": 1,
        "logprob_diff_mean_staleness_1": 2 * LN2,
        "rejected_token_share_staleness_1": 1,
        "rejected_token_share_staleness_2": 0,
    }
    assert {name: told[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_icepop_masks_weights_and_leaves_the_mask_alone() -> None:
    mask_BR, weights_BR, told = corrected(weights="token", bound="mask", weight_min=0.4, weight_max=3.0, normalize=True)
    assert mask_BR.tolist() == [[1, 1], [1, 0]] and weights_BR is not None
    torch.testing.assert_close(weights_BR, torch.tensor([[2.4, 0.0], [0.6, 0.0]]))  # mean (2 + 0 + 0.5) / 3
    assert told["importance_weight_norm"] == pytest.approx(2.5 / 3)
    assert told["importance_weight_mean"] == pytest.approx(1)


def test_a_token_stays_where_every_rule_keeps_it() -> None:
    rules = [{"statistic": "token_k1", "high": 3.0}, {"statistic": "token_k3", "high": 0.2}]
    mask_BR, _, told = corrected(reject=rules)
    assert mask_BR.tolist() == [[0, 0], [1, 0]]  # k1 takes the 4; k3 of 2 is 0.307, of 4 1.6, of 1/2 0.193
    assert told["rejected_token_share/token_k1"] == pytest.approx(1 / 3)
    assert told["rejected_token_share/token_k3"] == pytest.approx(2 / 3)
    mask_BR, _, _ = corrected(second_moment=0.9)
    assert mask_BR.tolist() == [[1, 0], [1, 0]]


OPTIONS: list[dict[str, Any]] = [
    {"weights": "sequence", "normalize": True},
    {"weights": "geometric", "bound": "mask", "weight_min": 0.5},
    {"weights": "token", "reject": [{"statistic": "token_k1", "high": 1.5}]},
    {"reject": [{"statistic": "seq_mean_k3", "high": 0.1}, {"statistic": "seq_max_k2", "high": 0.6}]},
    {"second_moment": 0.2},
]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), options=st.sampled_from(OPTIONS), padding=st.integers(0, 4))
def test_padding_masked_tokens_and_the_order_of_samples_do_not_matter(
    seed: int, options: dict[str, Any], padding: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old_BR = torch.randn(5, 6, generator=generator)
    batch = trajectories(seed, groups=5, group_size=1, masked=True)
    collated = collate(batch)
    width = collated.mask_BR.shape[1]
    config = CorrectionConfig(**options)
    plain = correct(config, collated, old_BR[:, :width], batch, policy_version=3)
    noise_BR = torch.where(collated.mask_BR > 0, 0.0, 7.0)
    order = torch.randperm(5, generator=generator)

    def widened(values_BR: Tensor) -> Tensor:
        return torch.nn.functional.pad(values_BR[order], (0, padding))

    other = replace(
        collated,
        mask_BR=widened(collated.mask_BR),
        behaviour_logprobs_BR=widened(collated.behaviour_logprobs_BR - noise_BR),
    )
    found = correct(
        config, other, widened(old_BR[:, :width] + noise_BR), [batch[index] for index in order], policy_version=3
    )
    assert torch.equal(found.mask_BR, widened(plain.mask_BR))
    assert torch.all(plain.mask_BR <= collated.mask_BR)
    assert (found.weights_BR is None) == (plain.weights_BR is None)
    if found.weights_BR is not None and plain.weights_BR is not None:
        torch.testing.assert_close(found.weights_BR, widened(plain.weights_BR), rtol=1e-5, atol=0)
    assert found.metrics == pytest.approx(plain.metrics, rel=1e-4, abs=1e-6)


# The whole step.


def test_vanilla_with_truncated_token_weights_is_decoupled() -> None:
    for seed in range(2):
        batch = trajectories(seed, masked=True)
        found = trained(batch, loss="vanilla", correction=CorrectionConfig(weights="token", weight_max=2.0))
        torch.testing.assert_close(found, trained(batch, loss="decoupled", importance_cap=2.0), rtol=0, atol=CLOSE)


def far_off(batch: Sequence[Trajectory]) -> list[Trajectory]:
    """The first sample of each group could hardly have been drawn by the policy in training, or by any like it."""
    return [
        replace(t, behaviour_logprobs=t.behaviour_logprobs + 100) if index % 4 == 0 else t
        for index, t in enumerate(batch)
    ]


def test_rejected_samples_leave_loss_and_denominators_and_stay_in_the_baseline() -> None:
    batch = trajectories(3)
    rule = CorrectionConfig(reject=(RejectionConfig(statistic="seq_mean_k1", high=1e6),))
    masked = [
        replace(t, loss_mask=np.zeros(len(t.response_ids), np.uint8)) if index % 4 == 0 else t
        for index, t in enumerate(batch)
    ]
    for loss in ("vanilla", "decoupled"):
        found = trained(far_off(batch), loss=loss, correction=rule)
        torch.testing.assert_close(found, trained(masked, loss=loss), rtol=0, atol=CLOSE)
    alone = [t for index, t in enumerate(batch) if index % 4]
    assert not torch.allclose(found, trained(alone, loss="decoupled"), atol=1e-6), "the baseline would be another"


def test_a_step_whose_tokens_are_all_rejected_moves_nothing_but_by_weight_decay() -> None:
    run = learner(correction=CorrectionConfig(reject=(RejectionConfig(statistic="token_k2", high=1e-9),)))
    told = run.train(trajectories(0), step=0, policy_version=3)
    assert (told["rejected_token_share"], told["tokens"], told["samples_computed"], told["grad_norm"]) == (1, 0, 0, 0)


def test_a_server_is_judged_by_its_rejected_tokens_too() -> None:
    run = learner(correction=CorrectionConfig(reject=(RejectionConfig(statistic="seq_mean_k1", high=1.2),)))
    told = run.train(fleet({"honest": 0.0, "liar": -0.5}), step=4, policy_version=3)
    assert by_server(run.mismatches) == pytest.approx({"honest": 0.0, "liar": 0.5}, abs=1e-5)
    assert 0 < told["rejected_token_share"] < 1
    assert told["logprob_diff_max"] == pytest.approx(0.5, abs=1e-5)


def test_a_correction_that_does_nothing_changes_nothing_and_a_default_one_is_off() -> None:
    assert not AlgorithmConfig().correction.on
    idle = CorrectionConfig(reject=(RejectionConfig(statistic="token_k2", high=1e6),))
    torch.testing.assert_close(trained(trajectories(1), correction=idle), trained(trajectories(1)), rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"normalize": True}, "set weights to"),
        ({"bound": "mask"}, "set weights to"),
        ({"weights": "token", "bound": "mask", "weight_max": None}, "needs weight_min or weight_max"),
        ({"weights": "token", "weight_min": 0.5}, "needs bound='mask'"),
        ({"weights": "token", "bound": "mask", "weight_min": 2.0}, "must be below"),
        ({"reject": [{"statistic": "token_k3", "high": 1.0}] * 2}, "stands twice"),
        ({"reject": [{"statistic": "seq_max_k1", "high": 2.0}]}, "unknown rejection statistic"),
        ({"reject": [{"statistic": "token_k2", "high": 2.0, "low": 1.0}]}, "drop low"),
        ({"reject": [{"statistic": "token_k1", "high": 0.9}]}, "set high above 1"),
        ({"reject": [{"statistic": "token_k1", "high": 2.0, "low": 2.0}]}, "must be below"),
    ],
)
def test_a_correction_that_does_not_hold_together_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CorrectionConfig(**fields)


def test_a_correction_that_does_not_fit_the_loss_is_refused() -> None:
    with pytest.raises(ValidationError, match="set loss='vanilla'"):
        AlgorithmConfig(loss="decoupled", correction=CorrectionConfig(weights="token"))
    with pytest.raises(ValidationError, match="set old_logprobs='proximal'"):
        AlgorithmConfig(loss="vanilla", old_logprobs="behaviour", correction=CorrectionConfig(second_moment=0.04))
