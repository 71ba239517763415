"""A trajectory of the wire as the trainer room sees it."""

import numpy as np

import protos
from protos.arrays import to_array
from services.ranks.work import from_wire


def test_the_trainer_sees_the_reward_and_what_it_is_made_of() -> None:
    wire = protos.Trajectory(
        key=protos.SampleKey(group=7, index=2),
        prompt_ids=to_array(np.array([1, 2], np.int32)),
        response_ids=to_array(np.array([3], np.int32)),
        behaviour_logprobs=to_array(np.array([-0.5], np.float32)),
        spans=[protos.VersionSpan(policy_version=4, num_tokens=1)],
        stop_reason=protos.STOP_REASON_LENGTH,
        reward=1.5,
        reward_breakdown={"exact": 1.0, "exact/form": 0.5},
        server="rollout-1",
        baseline=True,
    )
    found = from_wire(wire)
    assert (found.sample, found.group, found.reward, found.server) == ("7/2", 7, 1.5, "rollout-1")
    assert found.reward_parts == {"exact": 1.0, "exact/form": 0.5}
    assert (found.spans, found.stop_reason) == (((4, 1),), "length")
    assert found.baseline
    assert found.loss_mask is None and found.reference_logprobs is None
    wire.ClearField("baseline")
    assert not from_wire(wire).baseline
