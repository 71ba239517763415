"""Overlong penalty and PF-PPO against numbers worked out by hand, and through the whole step. B samples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.unit.trainer.test_step import learner, trained, trajectories
from trainer.batch import Trajectory, collate
from trainer.config import AlgorithmConfig, OverlongConfig
from trainer.configs.correction import CorrectionConfig
from trainer.randomness import step_generator
from trainer.rewards.overlong import overlong_metrics, overlong_penalty
from trainer.rewards.resampling import resample, resampling_metrics, resampling_weights


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_penalty_grows_from_zero_to_the_factor_within_the_buffer() -> None:
    lengths_B = torch.tensor([1, 15, 16, 17, 18, 20])
    found = overlong_penalty(lengths_B, limit=20, buffer=4, factor=2.0)
    torch.testing.assert_close(found, doubles(0, 0, 0, -0.5, -1, -2), rtol=0, atol=0)
    assert overlong_metrics(found) == {"overlong_penalty_mean": pytest.approx(-3.5 / 6), "overlong_share": 0.5}


def test_the_penalty_is_a_part_of_the_reward_that_advantages_see() -> None:
    overlong = OverlongConfig(limit=5, buffer=3, factor=0.7)
    batch = trajectories(2)
    shaped = [replace(t, reward=t.reward - 0.7 * max(len(t.response_ids) - 2, 0) / 3) for t in batch]
    found = trained(batch, overlong=overlong)
    torch.testing.assert_close(found, trained(shaped), rtol=0, atol=1e-6)
    assert not torch.allclose(found, trained(batch), atol=1e-4)
    told = learner(overlong=overlong).train(batch, step=0, policy_version=3)
    plain = learner().train(batch, step=0, policy_version=3)
    lengths = np.array([len(t.response_ids) for t in batch])
    assert told["overlong_share"] == np.mean(lengths > 2)
    assert told["overlong_penalty_mean"] == pytest.approx(np.mean(-0.7 * np.maximum(lengths - 2, 0) / 3))
    assert told["reward_mean"] == plain["reward_mean"], "the reward as it came"
    assert "overlong_share" not in plain


@pytest.mark.parametrize(
    ("method", "expected"),
    [("pow", [4.0, 0.0, 1.0, 9.0]), ("max_min", [1.0, 0.0, 0.0, 1.0]), ("max_random", [0.1, 0.1, 0.1, 0.4])],
)
def test_chances_of_each_method(method: str, expected: list[float]) -> None:
    found = resampling_weights(doubles(-2, 0, 1, 3), method=method, power=2.0)
    torch.testing.assert_close(found, doubles(*expected) + 1e-8, rtol=0, atol=1e-15)
    with pytest.raises(ValueError, match="best"):
        resampling_weights(doubles(1), method="best", power=2.0)


def test_samples_are_drawn_by_their_chances_and_the_same_for_the_same_step() -> None:
    rewards_B = doubles(*[0, 1, 3] * 4000)

    def draw(step: int) -> torch.Tensor:
        return resample(rewards_B, method="pow", power=2.0, generator=step_generator(0, step))

    rows_B = draw(1)
    shares = torch.bincount(rewards_B[rows_B].long(), minlength=4) / len(rows_B)
    assert shares.tolist() == pytest.approx([0, 0.1, 0, 0.9], abs=0.01)
    assert torch.equal(rows_B, draw(1)) and not torch.equal(rows_B, draw(2))
    assert resampling_metrics(torch.tensor([0, 0, 1, 3])) == {"resampled_unique_share": 0.75}


def test_equal_rewards_and_none_at_all_are_drawn_evenly() -> None:
    for value in (0.0, 1.0):
        rows_B = resample(doubles(*[value] * 500), method="pow", power=2.0, generator=step_generator(3, 4))
        assert 0.5 < resampling_metrics(rows_B)["resampled_unique_share"] < 0.75  # 1 - 1/e


def drawn(batch: Sequence[Trajectory], step: int) -> list[int]:
    rewards_B = collate(batch).rewards_B
    rows_B: list[int] = resample(rewards_B, method="pow", power=2.0, generator=step_generator(0, step)).tolist()
    return rows_B


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"minibatches": 2, "epochs": 2},
        {"kl_use": "loss", "kl_coef": 0.1, "correction": CorrectionConfig(second_moment=1e9)},
    ],
)
def test_a_drawn_batch_trains_as_one_that_was_given_so(options: dict[str, Any]) -> None:
    """Without a baseline the advantages of the given batch are the same."""
    batch = trajectories(3)
    rows = drawn(batch, 0)
    assert len(set(rows)) < len(rows)
    given = [replace(batch[row], sample=f"s{index}") for index, row in enumerate(rows)]
    options = {"adv_estimator": "reinforce", **options}
    found = trained(batch, resample="pow", **options)
    torch.testing.assert_close(found, trained(given, **options), rtol=0, atol=1e-8)
    assert not torch.allclose(found, trained(batch, **options), atol=1e-6)


def test_advantages_are_those_of_the_batch_before_the_draw() -> None:
    batch = trajectories(3)
    found = learner(resample="max_min")
    told = found.train(batch, step=0, policy_version=3)
    assert 0 < told["resampled_unique_share"] < 1
    assert told["reward_mean"] == pytest.approx(np.mean([t.reward for t in batch]))
    alone = [replace(t, group=index) for index, t in enumerate(batch)]
    assert not torch.allclose(trained(batch, resample="pow"), trained(alone, resample="pow"), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"limit": 8, "buffer": 9}, "larger than limit"),
        ({"limit": 8, "buffer": 0}, "greater than or equal to 1"),
        ({"buffer": 2}, "limit"),
    ],
)
def test_a_penalty_that_does_not_hold_together_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OverlongConfig(**fields)


def test_a_penalty_that_nobody_reads_is_refused() -> None:
    with pytest.raises(ValidationError, match="reads only its parts"):
        AlgorithmConfig(adv_estimator="gdpo", gdpo_weights={"exact": 1.0}, overlong=OverlongConfig(limit=8, buffer=2))
