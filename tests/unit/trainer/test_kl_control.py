"""The adaptive KL coefficient against its formula."""

import pytest

from trainer.rewards.kl_control import adapted


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.02),  # on target
        (0.11, 0.02 * (1 + 0.1 * 64 / 1000)),
        (0.5, 0.02 * (1 + 0.2 * 64 / 1000)),  # the error is bounded above
        (0.0, 0.02 * (1 - 0.2 * 64 / 1000)),  # and below
    ],
)
def test_the_coefficient_moves_in_proportion_to_the_bounded_error(kl: float, expected: float) -> None:
    assert adapted(0.02, kl, target=0.1, horizon=1000, samples=64) == pytest.approx(expected, rel=1e-12)


def test_a_batch_that_could_turn_the_sign_is_refused() -> None:
    assert adapted(1.0, 0.0, target=0.1, horizon=13, samples=64) > 0
    with pytest.raises(ValueError, match="kl_horizon=12 must exceed a fifth of the batch, which has 64"):
        adapted(1.0, 0.0, target=0.1, horizon=12, samples=64)
