"""pass@k and majorities, computed by hand and by trying every choice of k samples."""

from __future__ import annotations

from itertools import combinations

import pytest

from services.evaluation.verdicts import Verdict, figures, majority_is_correct, pass_at_k, vote_of


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        (4, 2, 2, 5 / 6),  # 1 - 1 / 6
        (5, 2, 3, 0.9),  # 1 - C(3, 3) / C(5, 3) = 1 - 1 / 10
        (5, 3, 3, 1.0),  # two wrong ones cannot fill three places
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k_by_hand(num_samples: int, num_correct: int, k: int, expected: float) -> None:
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected)


@pytest.mark.parametrize("num_correct", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_choices_with_a_correct_sample(num_correct: int, k: int) -> None:
    samples = [index < num_correct for index in range(6)]
    choices = [any(chosen) for chosen in combinations(samples, k)]
    assert pass_at_k(6, num_correct, k) == pytest.approx(sum(choices) / len(choices))


@pytest.mark.parametrize("k", [0, 4])
def test_more_than_there_is_cannot_be_drawn(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} needs at least {k} samples, not 3"):
        pass_at_k(3, 1, k)


def voting(*votes: tuple[str | None, float]) -> list[Verdict]:
    return [Verdict(reward, vote) for vote, reward in votes]


def test_the_most_frequent_answer_is_judged_by_its_own_reward() -> None:
    assert majority_is_correct(voting(("7", 0.0), ("8", 1.0), ("8", 1.0)), threshold=1.0)
    assert not majority_is_correct(voting(("7", 0.0), ("7", 0.0), ("8", 1.0)), threshold=1.0)


def test_of_equal_counts_the_answer_that_came_first_wins() -> None:
    assert majority_is_correct(voting(("8", 1.0), ("7", 0.0), ("7", 0.0), ("8", 1.0)), threshold=1.0)
    assert not majority_is_correct(voting(("7", 0.0), ("8", 1.0), ("8", 1.0), ("7", 0.0)), threshold=1.0)


def test_who_has_no_answer_has_no_vote() -> None:
    assert majority_is_correct(voting((None, 0.0), (None, 0.0), ("8", 1.0)), threshold=1.0)
    assert not majority_is_correct(voting((None, 1.0), (None, 1.0)), threshold=1.0)


def test_a_vote_is_the_answer_and_without_a_reader_the_text() -> None:
    assert vote_of("72", "so #### 72") == "72"
    assert vote_of("", "no number") is None, "the reward looked and found none"
    assert vote_of(None, " 72\n") == "72"
    assert vote_of(None, "  ") == "", "an empty response is a response like any other"


def test_figures_are_means_over_the_prompts_that_have_enough_samples() -> None:
    first = voting(("8", 1.0), ("7", 0.0), ("8", 1.0), ("7", 0.0))
    second = voting(("1", 0.0), ("2", 0.0), ("1", 0.0), ("3", 1.5))
    third = voting(("5", 1.0))  # its other samples have no verdict
    found = figures([first, second, third, []], ks=(4, 2), threshold=1.0)
    assert found == {
        "pass@1": pytest.approx((0.5 + 0.25 + 1.0) / 3),
        "pass@2": pytest.approx((5 / 6 + 0.5) / 2),
        "maj@2": 0.5,  # first: 8 came first; second: 1
        "pass@4": 1.0,
        "maj@4": 0.5,
        "mean_reward": pytest.approx((2.0 + 1.5 + 1.0) / 9),
    }


def test_what_counts_as_correct_is_a_threshold() -> None:
    assert figures([voting(("a", 0.5), ("b", 0.2))], ks=(2,), threshold=0.5)["pass@1"] == 0.5
    assert figures([[], []], ks=(1,), threshold=1.0) == {}, "no verdict, no figure"
