"""Greedy samples are told apart, compared with, and never trained on. B samples."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.trainer.test_step import learner, trained, trajectories
from trainer.batch import Trajectory
from trainer.config import OverlongConfig
from trainer.rewards.baselines import baseline_metrics, baselines, split

GREEDY = (0.25, 0.75, 0.5, 0.0)


def with_greedy(batch: list[Trajectory], rewards: tuple[float, ...] = GREEDY) -> list[Trajectory]:
    """The batch with a greedy sample behind each group of four."""
    found = []
    for group, reward in enumerate(rewards):
        own = [one for one in batch if one.group == group]
        greedy = replace(own[0], sample=f"g{group}", baseline=True, reward=reward, stop_reason="length")
        found += [*own, replace(greedy, spans=((1, len(greedy.response_ids)),))]
    return found


def test_greedy_samples_are_told_apart_in_their_order() -> None:
    batch = trajectories(0)
    trained_on, greedy = split(with_greedy(batch))
    assert trained_on == batch
    assert [(one.group, one.reward) for one in greedy] == list(enumerate(GREEDY))
    assert split(batch) == (batch, [])


def test_a_sample_has_the_baseline_of_its_group() -> None:
    greedy = split(with_greedy(trajectories(0)))[1]
    found_B = baselines(greedy, torch.tensor([3, 1, 1, 0]))
    torch.testing.assert_close(found_B, torch.tensor([0.0, 0.75, 0.75, 0.25]), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"for the groups \[5, 9\]"):
        baselines(greedy, torch.tensor([9, 0, 5]))
    assert baseline_metrics(greedy) == {"baseline_reward_mean": 0.375}
    assert baseline_metrics([]) == {}


def test_a_long_greedy_response_has_the_penalty_of_a_long_one() -> None:
    one = replace(split(with_greedy(trajectories(0)))[1][0], reward=1.0)
    long = replace(
        one,
        response_ids=np.ones(9, np.int32),
        behaviour_logprobs=np.zeros(9, np.float32),
        reference_logprobs=None,
        spans=((1, 9),),
    )
    overlong = OverlongConfig(limit=10, buffer=4, factor=1.0)
    torch.testing.assert_close(baselines([long], torch.tensor([0, 0]), overlong=overlong), torch.tensor([0.25, 0.25]))


@pytest.mark.parametrize("options", [{}, {"overlong": OverlongConfig(limit=5, buffer=3)}, {"minibatches": 2}])
def test_remax_is_reinforce_with_rewards_less_the_greedy_one(options: dict[str, Any]) -> None:
    batch = trajectories(1)
    found = trained(with_greedy(batch), adv_estimator="remax", **options)
    if "overlong" in options:  # the greedy sample of a group is as long as its first one
        first = {one.group: len(one.response_ids) for one in reversed(batch)}
        baseline = {group: reward - max(first[group] - 2, 0) / 3 for group, reward in enumerate(GREEDY)}
    else:
        baseline = dict(enumerate(GREEDY))
    lowered = [replace(one, reward=one.reward - baseline[one.group]) for one in batch]
    torch.testing.assert_close(found, trained(lowered, adv_estimator="reinforce", **options), rtol=0, atol=1e-6)
    assert not torch.allclose(found, trained(batch, adv_estimator="reinforce", **options), atol=1e-4)


def test_a_sample_as_good_as_the_greedy_one_has_no_gradient() -> None:
    batch = [replace(one, reward=0.1) for one in trajectories(1)]
    told = learner(adv_estimator="remax").train(with_greedy(batch, (0.1, 0.1, 0.1, 0.2)), step=0, policy_version=3)
    assert (told["samples"], told["samples_computed"]) == (16, 4)


def test_without_its_greedy_sample_a_group_is_not_trained_on() -> None:
    with pytest.raises(ValueError, match=r"no greedy sample came for the groups \[2, 3\]"):
        learner(adv_estimator="remax").train(
            with_greedy(trajectories(0), GREEDY[:2]) + trajectories(0)[8:], step=0, policy_version=3
        )


@pytest.mark.parametrize("name", ["grpo", "reinforce", "optimal_token_baseline"])
def test_no_other_estimator_sees_the_greedy_samples(name: str) -> None:
    batch = trajectories(2)
    assert torch.equal(trained(with_greedy(batch), adv_estimator=name), trained(batch, adv_estimator=name))


def test_the_metrics_are_of_the_samples_that_are_trained_on() -> None:
    batch = trajectories(0)
    found = learner(adv_estimator="remax")
    told = found.train(with_greedy(batch), step=1, policy_version=3)
    plain = learner(adv_estimator="reinforce").train(batch, step=1, policy_version=3)
    names = ("samples", "tokens", "reward_mean", "response_length_mean", "truncation_rate", "staleness_mean")
    assert {name: told[name] for name in names} == {name: plain[name] for name in names}
    assert told["baseline_reward_mean"] == 0.375 and "baseline_reward_mean" not in plain
    assert sum(cell.num_tokens for cell in found.mismatches) == told["tokens"]
