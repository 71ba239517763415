"""What comes back from a rollout server: the good is taken, and each way of being wrong has its name."""

from collections.abc import Callable

import numpy as np
import pytest

import protos
from protos.arrays import to_array
from services.stages.intake import all_finite, refuse, refuse_reference


def good(num_tokens: int = 3) -> protos.Trajectory:
    return protos.Trajectory(
        key=protos.SampleKey(group=1, index=0),
        prompt_ids=to_array(np.array([1, 2], np.int32)),
        response_ids=to_array(np.arange(num_tokens, dtype=np.int32)),
        behaviour_logprobs=to_array(np.full(num_tokens, -0.5, np.float32)),
        spans=[protos.VersionSpan(policy_version=4, num_tokens=num_tokens)],
    )


def judged(trajectory: protos.Trajectory, *others: protos.Trajectory) -> str:
    return refuse(trajectory, newest_version=5, finite=all_finite([*others, trajectory]))


def logprobs(*values: float) -> protos.Array:
    return to_array(np.array(values, np.float32))


def torn(array: protos.Array) -> protos.Array:
    return protos.Array(dtype=array.dtype, shape=array.shape, data=array.data[:-1])


def test_a_good_trajectory_is_taken() -> None:
    assert judged(good()) == ""
    masked = good()
    masked.loss_mask.CopyFrom(to_array(np.ones(3, np.uint8)))
    assert judged(masked) == ""


def test_a_certain_token_has_a_logprob_of_zero_and_a_little_rounding_is_forgiven() -> None:
    trajectory = good()
    trajectory.behaviour_logprobs.CopyFrom(logprobs(0.0, -0.0, 1e-6))
    assert judged(trajectory) == ""


def change_ids(trajectory: protos.Trajectory) -> None:
    trajectory.response_ids.CopyFrom(to_array(np.zeros(3, np.int64)))


def square_ids(trajectory: protos.Trajectory) -> None:
    trajectory.response_ids.CopyFrom(to_array(np.zeros((1, 3), np.int32)))


def tear_ids(trajectory: protos.Trajectory) -> None:
    trajectory.response_ids.CopyFrom(torn(trajectory.response_ids))


def no_prompt(trajectory: protos.Trajectory) -> None:
    trajectory.prompt_ids.CopyFrom(to_array(np.zeros(0, np.int32)))


def no_ids(trajectory: protos.Trajectory) -> None:
    trajectory.ClearField("response_ids")


def no_tokens(trajectory: protos.Trajectory) -> None:
    trajectory.CopyFrom(good(0))


def too_many_logprobs(trajectory: protos.Trajectory) -> None:
    trajectory.behaviour_logprobs.CopyFrom(logprobs(*[-0.5] * 4))


def double_logprobs(trajectory: protos.Trajectory) -> None:
    trajectory.behaviour_logprobs.CopyFrom(to_array(np.full(3, -0.5)))


def short_mask(trajectory: protos.Trajectory) -> None:
    trajectory.loss_mask.CopyFrom(to_array(np.ones(2, np.uint8)))


def not_a_number(trajectory: protos.Trajectory) -> None:
    trajectory.behaviour_logprobs.CopyFrom(logprobs(-0.5, float("nan"), -0.5))


def minus_infinity(trajectory: protos.Trajectory) -> None:
    trajectory.behaviour_logprobs.CopyFrom(logprobs(-0.5, float("-inf"), -0.5))


def above_zero(trajectory: protos.Trajectory) -> None:
    trajectory.behaviour_logprobs.CopyFrom(logprobs(-0.5, 0.1, -0.5))


def no_spans(trajectory: protos.Trajectory) -> None:
    del trajectory.spans[:]


def long_spans(trajectory: protos.Trajectory) -> None:
    trajectory.spans.add(policy_version=4, num_tokens=1)


def from_the_future(trajectory: protos.Trajectory) -> None:
    trajectory.spans[0].policy_version = 6


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (change_ids, "malformed_ids"),
        (square_ids, "malformed_ids"),
        (tear_ids, "malformed_ids"),
        (no_prompt, "malformed_ids"),
        (no_ids, "malformed_ids"),
        (no_tokens, "empty"),
        (too_many_logprobs, "logprobs_do_not_match_tokens"),
        (double_logprobs, "logprobs_do_not_match_tokens"),
        (short_mask, "mask_does_not_match_tokens"),
        (not_a_number, "logprobs_not_finite"),
        (minus_infinity, "logprobs_not_finite"),
        (above_zero, "logprobs_not_finite"),
        (no_spans, "spans_do_not_match_tokens"),
        (long_spans, "spans_do_not_match_tokens"),
        (from_the_future, "version_from_the_future"),
    ],
)
def test_each_way_of_being_wrong_has_its_name(spoil: Callable[[protos.Trajectory], None], reason: str) -> None:
    trajectory = good()
    spoil(trajectory)
    assert judged(trajectory, good()) == reason
    assert judged(good(), trajectory) == "", "its neighbours in the reply are taken"


def test_a_torn_neighbour_does_not_hide_a_nan() -> None:
    """Five odd bytes before and three after would let the numbers between them be read at the wrong places."""
    before, wrong, after = good(), good(), good()
    before.behaviour_logprobs.data = b"\x00" * 5
    wrong.behaviour_logprobs.CopyFrom(logprobs(float("nan"), -0.5, -0.5))
    after.behaviour_logprobs.data = b"\x00" * 3
    finite = all_finite([before, wrong, after])
    assert refuse(wrong, newest_version=5, finite=finite) == "logprobs_not_finite"


def test_reference_logprobs_are_held_to_the_response() -> None:
    trajectory = good()
    assert refuse_reference(logprobs(-1.0, -2.0, -3.0), trajectory) == ""
    assert refuse_reference(logprobs(-1.0), trajectory) == "reference_does_not_match_tokens"
    assert refuse_reference(protos.Array(), trajectory) == "reference_does_not_match_tokens"
    assert refuse_reference(logprobs(-1.0, float("nan"), -3.0), trajectory) == "reference_not_finite"
