"""Advantage estimators against numbers worked out by hand, in float64. B samples, R response tokens."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.advantages import ESTIMATORS, AdvantageInputs, AdvantageOptions, gae
from trainer.config import ADVANTAGE_ESTIMATORS


def inputs(rewards: list[float], groups: list[int], lengths: list[int] | None = None) -> AdvantageInputs:
    """Outcome rewards; every token had a probability of 1/2 among 1/2, 1/4 and 1/4."""
    lengths = lengths or [2] * len(rewards)
    mask_BR = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).double()
    rewards_BR = torch.zeros_like(mask_BR)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        rewards_BR[row, length - 1] = reward
    return AdvantageInputs(
        token_rewards_BR=rewards_BR,
        mask_BR=mask_BR,
        group_B=torch.tensor(groups),
        logprobs_BR=torch.full_like(mask_BR, math.log(0.5)),
        square_sums_BR=torch.full_like(mask_BR, 0.375),
        baseline_B=0.5 * torch.tensor(groups).double(),
        reference_logprobs_BR=torch.full_like(mask_BR, math.log(0.25)),
        values_BR=0.5 * mask_BR,
    )


def advantages(name: str, given_inputs: AdvantageInputs, **options: Any) -> torch.Tensor:
    return ESTIMATORS[name](given_inputs, AdvantageOptions(**options)).advantages_BR


def close(found: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_config_names_exactly_the_estimators_that_exist() -> None:
    assert set(ADVANTAGE_ESTIMATORS) == set(ESTIMATORS)


def test_grpo_divides_by_the_unbiased_standard_deviation() -> None:
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)  # rewards 1, 0, 1, 0: mean 1/2, squares 4 * 1/4, over n - 1 = 3
    close(advantages("grpo", inputs([1, 0, 1, 0], [7, 7, 7, 7], [1, 2, 2, 1])), [[a, 0], [-a, -a], [a, a], [-a, 0]])


def test_dr_grpo_leaves_the_division_out() -> None:
    found = advantages("grpo", inputs([3, 0, 0], [1, 1, 1]), norm_by_std=False)
    close(found, [[2, 2], [-1, -1], [-1, -1]])


def test_a_grpo_group_of_one_has_mean_zero_and_deviation_one() -> None:
    close(advantages("grpo", inputs([5], [0])), [[5 / (1 + 1e-6)] * 2])
    close(advantages("grpo", inputs([5], [0]), norm_by_std=False), [[5, 5]])


def test_groups_with_any_numbers_do_not_mix() -> None:
    found = advantages("grpo", inputs([1, 10, 3, 30], [900, -4, 900, -4]), norm_by_std=False)
    close(found, [[-1, -1], [-10, -10], [1, 1], [10, 10]])


def test_rloo_takes_the_mean_of_the_others_as_baseline() -> None:
    close(advantages("rloo", inputs([3, 0, 6], [1, 1, 1])), [[0, 0], [-4.5, -4.5], [4.5, 4.5]])
    close(advantages("rloo", inputs([3], [1])), [[3, 3]])


def test_reinforce_gives_the_return_to_go() -> None:
    mask_BR = torch.tensor([[1, 0, 1]]).double()
    rewards_BR = torch.tensor([[-0.5, 0.0, 2.0]]).double()
    given_inputs = AdvantageInputs(token_rewards_BR=rewards_BR, mask_BR=mask_BR, group_B=torch.tensor([0]))
    close(advantages("reinforce", given_inputs), [[1.5, 0, 2]])


def test_pass_at_k_teaches_only_the_best_sample_and_only_what_it_is_ahead() -> None:
    a = 4 / (math.sqrt(7) + 1e-6)  # rewards 0, 5, 1: mean 2, squares 4 + 9 + 1 = 14, over n - 1 = 2
    close(advantages("grpo_passk", inputs([0, 5, 1], [1, 1, 1], [1, 2, 2])), [[0, 0], [a, a], [0, 0]])
    found = advantages("grpo_passk", inputs([0, 5, 1, 3, 3, -1], [1, 1, 1, 0, 0, 0]), norm_by_std=False)
    close(found, [[0, 0], [4, 4], [0, 0], [0, 0], [0, 0], [0, 0]])


def test_pass_at_k_refuses_a_group_of_one() -> None:
    with pytest.raises(ValueError, match="a group of one has none"):
        advantages("grpo_passk", inputs([1, 2, 3], [0, 0, 4]))


def test_opo_weighs_the_mean_by_length() -> None:
    found = advantages("opo", inputs([6, 2], [0, 0], [1, 3]))  # baseline (1 * 6 + 3 * 2) / 4 = 3
    close(found, [[3, 0, 0], [-1, -1, -1]])
    close(advantages("opo", inputs([6], [0])), [[6, 6]])


def test_gpg_scales_by_samples_per_reward_that_is_not_zero() -> None:
    found = ESTIMATORS["gpg"](inputs([1, 0, 0, 0], [0, 0, 1, 1]), AdvantageOptions())
    close(found.advantages_BR, [[2, 2], [-2, -2], [0, 0], [0, 0]])
    assert found.metrics == {"gpg_scale": 4}
    assert not advantages("gpg", inputs([0, 0], [0, 0])).any()


def test_reinforce_plus_plus_discounts_and_whitens_over_the_batch() -> None:
    found = ESTIMATORS["reinforce_plus_plus"](inputs([4, 0], [0, 1]), AdvantageOptions(gamma=0.5))
    close(found.returns_BR, [[2, 4], [0, 0]])
    scale = 1 / math.sqrt(11 / 3)  # mean 3/2; squares 1/4 + 25/4 + 9/4 + 9/4 = 11, over n - 1 = 3
    expected = torch.tensor([[0.5, 2.5], [-1.5, -1.5]], dtype=torch.float64) * scale
    torch.testing.assert_close(found.advantages_BR, expected, rtol=0, atol=1e-7)


def test_reinforce_plus_plus_passes_what_a_tool_said_undiscounted() -> None:
    given_inputs = AdvantageInputs(
        token_rewards_BR=torch.tensor([[0.0, 7.0, 4.0], [0.0, 0.0, 0.0]]).double(),
        mask_BR=torch.tensor([[1, 0, 1], [1, 1, 1]]).double(),
        group_B=torch.tensor([0, 1]),
    )
    found = ESTIMATORS["reinforce_plus_plus"](given_inputs, AdvantageOptions(gamma=0.5))
    close(found.returns_BR, [[2, 0, 4], [0, 0, 0]])
    assert found.advantages_BR[0, 1] == 0


def test_reinforce_plus_plus_baseline_whitens_what_the_group_mean_leaves() -> None:
    found = advantages("reinforce_plus_plus_baseline", inputs([3, 1, 5, 5], [0, 0, 1, 1], [1, 1, 1, 1]))
    a = 1 / math.sqrt(2 / 3)  # deviations 1, -1, 0, 0: squares 2 over n - 1 = 3
    torch.testing.assert_close(found, torch.tensor([[a], [-a], [0], [0]]).double(), rtol=0, atol=1e-7)


def test_gdpo_norms_each_part_by_itself() -> None:
    told = replace(
        inputs([9, 9, 9, 9], [0, 0, 1, 1]), reward_parts_BK=torch.tensor([[1, 0], [0, 0], [0, 20], [0, 0.0]]).double()
    )
    found = ESTIMATORS["gdpo"](told, AdvantageOptions(part_weights=(1.0, 2.0)))
    # each part is +-1/sqrt(2) in the group where it differs, 0 in the other: a, -a, 2a, -2a on two tokens each
    a = 1 / math.sqrt(20 / 7)  # squares 2 (1 + 1 + 4 + 4), over n - 1 = 7
    expected = torch.tensor([[a, a], [-a, -a], [2 * a, 2 * a], [-2 * a, -2 * a]]).double()
    torch.testing.assert_close(found.advantages_BR, expected, rtol=0, atol=1e-5)
    plain = ESTIMATORS["gdpo"](told, AdvantageOptions(part_weights=(1.0, 2.0), norm_by_std=False)).advantages_BR
    assert plain[2, 0] / plain[0, 0] == pytest.approx(40)


def test_gdpo_without_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the parts of the reward"):
        advantages("gdpo", inputs([1, 0], [0, 0]), part_weights=(1.0,))


def test_the_optimal_token_baseline_weighs_returns_by_the_variance_of_their_paths() -> None:
    told = replace(
        inputs([4, 1], [0, 0]),
        logprobs_BR=torch.tensor([[0.5, 0.25], [0.75, 0.5]]).double().log(),
        square_sums_BR=torch.tensor([[0.5, 0.5], [0.625, 0.5]]).double(),
    )
    # w = 1 - 2 pi + sum: 1/2, 1 and 1/8, 1/2; W: 1/2, 3/2 and 1/8, 5/8
    first, second = (4 * 0.5 + 0.125) / 0.625, (4 * 1.5 + 0.625) / 2.125
    found = advantages("optimal_token_baseline", told)
    expected = torch.tensor([[4 - first, 4 - second], [1 - first, 1 - second]]).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    weighted = replace(told, importance_weights_BR=torch.tensor([[2.0, 1.0], [1.0, 2.0]]).double())
    first, second = (4 * 2 + 0.125) / 2.125, (4 * 3 + 2.125) / 5.125  # W: 2, 3 and 1/8, 17/8
    expected = torch.tensor([[4 - first, 4 - second], [1 - first, 1 - second]]).double()
    torch.testing.assert_close(advantages("optimal_token_baseline", weighted), expected, rtol=0, atol=1e-6)


def test_where_only_the_longest_sample_reaches_there_is_no_baseline() -> None:
    found = advantages("optimal_token_baseline", inputs([4, 2], [0, 0], [3, 1]))
    torch.testing.assert_close(found, torch.tensor([[1, 4, 4], [-1, 0, 0]]).double(), rtol=0, atol=1e-6)
    close(advantages("optimal_token_baseline", inputs([4], [0])), [[4, 4]])


def test_the_tir_baseline_compares_own_tokens_whatever_tools_said_between() -> None:
    told = inputs([4, 2], [0, 0], [2, 3])
    told = replace(told, mask_BR=torch.tensor([[1, 1, 0], [1, 0, 1]]).double())
    found = advantages("tir_optimal_token_baseline", told)
    torch.testing.assert_close(found, torch.tensor([[1, 1, 0], [-1, 0, -1]]).double(), rtol=0, atol=1e-6)
    apart = advantages("optimal_token_baseline", told)
    torch.testing.assert_close(apart[:, 1:], torch.tensor([[0, 0], [0, 0]]).double(), rtol=0, atol=1e-6)


def test_a_token_baseline_without_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="needs logprobs and sums of squared probabilities"):
        advantages("optimal_token_baseline", replace(inputs([1, 0], [0, 0]), logprobs_BR=None))


def test_whitening_one_token_gives_nothing_to_learn() -> None:
    found = advantages("reinforce_plus_plus", inputs([1], [0], [1]))
    assert found.abs().item() < 1e-3


def test_gae_adds_up_discounted_temporal_differences() -> None:
    rewards_BR = torch.tensor([[0.0, 0.0, 1.0]]).double()
    values_BR = torch.tensor([[0.5, 0.25, 0.5]]).double()
    told = AdvantageInputs(
        token_rewards_BR=rewards_BR,
        mask_BR=torch.ones_like(rewards_BR),
        group_B=torch.tensor([0]),
        values_BR=values_BR,
    )
    found = gae(told, AdvantageOptions(gamma=1.0, lam=0.5))
    # deltas -1/4, 1/4, 1/2; L from the right 1/2, 1/4 + 1/4, -1/4 + 1/4
    close(found.returns_BR, [[0.5, 0.75, 1.0]])
    a = 1 / (6 * math.sqrt(1 / 12))  # L = 0, 1/2, 1/2: mean 1/3, squares 1/9 + 1/36 + 1/36 = 1/6, over n - 1 = 2
    expected = torch.tensor([[-2 * a, a, a]]).double()
    torch.testing.assert_close(found.advantages_BR, expected, rtol=0, atol=1e-6)


def test_gae_without_a_critic_is_told() -> None:
    with pytest.raises(ValueError, match="needs the values of a critic"):
        advantages("gae", replace(inputs([1], [0]), values_BR=None))


def test_remax_takes_the_greedy_reward_off() -> None:
    found = ESTIMATORS["remax"](inputs([3, 1], [4, 4], [2, 1]), AdvantageOptions())
    close(found.advantages_BR, [[1, 1], [-1, 0]])
    close(found.returns_BR, [[3, 3], [1, 0]])
    with pytest.raises(ValueError, match="greedy sample of each prompt"):
        advantages("remax", replace(inputs([3], [4], [2]), baseline_B=None))


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8])
def test_equal_rewards_give_exactly_zero_in_float32(size: int) -> None:
    rewards_BR = torch.full((size, 1), 0.1)
    given_inputs = AdvantageInputs(
        token_rewards_BR=rewards_BR, mask_BR=torch.ones_like(rewards_BR), group_B=torch.zeros(size, dtype=torch.int64)
    )
    for name in ("grpo", "grpo_passk", "rloo", "opo", "gpg"):
        assert not advantages(name, given_inputs).any()


@settings(deadline=None, max_examples=50)
@given(
    samples=st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=12),
    data=st.data(),
)
def test_a_permutation_of_samples_permutes_the_advantages(
    samples: list[tuple[float, int, int]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(samples))))
    for name in ESTIMATORS.keys() - {"grpo_passk", "gdpo"}:  # a group of one is refused; tested on parts elsewhere
        straight = advantages(name, inputs(*map(list, zip(*samples, strict=True))))
        shuffled = advantages(name, inputs(*map(list, zip(*[samples[i] for i in order], strict=True))))
        torch.testing.assert_close(shuffled, straight[order], rtol=1e-6, atol=1e-6)
