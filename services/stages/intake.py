"""What comes back from a rollout server is checked before anything is believed. A bad sample is data, with a reason."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import protos

ITEM_BYTES: dict[int, int] = {protos.DTYPE_INT32: 4, protos.DTYPE_FLOAT32: 4, protos.DTYPE_UINT8: 1}


def all_finite(trajectories: Sequence[protos.Trajectory]) -> bool:
    """Whether every behaviour logprob of a whole reply is a logprob: one look for the good case."""
    parts = [trajectory.behaviour_logprobs.data for trajectory in trajectories]
    return all(len(part) % 4 == 0 for part in parts) and plausible(b"".join(parts))  # a torn one would shift the rest


def refuse(trajectory: protos.Trajectory, *, newest_version: int, finite: bool) -> str:
    """Why a trajectory cannot be trained on; empty where it can. `finite`: its logprobs were looked at and are fine."""
    num_tokens = length(trajectory.response_ids, protos.DTYPE_INT32)
    if num_tokens < 0 or length(trajectory.prompt_ids, protos.DTYPE_INT32) <= 0:
        return "malformed_ids"
    if num_tokens == 0:
        return "empty"
    if length(trajectory.behaviour_logprobs, protos.DTYPE_FLOAT32) != num_tokens:
        return "logprobs_do_not_match_tokens"
    if trajectory.HasField("loss_mask") and length(trajectory.loss_mask, protos.DTYPE_UINT8) != num_tokens:
        return "mask_does_not_match_tokens"
    if not finite and not plausible(trajectory.behaviour_logprobs.data):
        return "logprobs_not_finite"
    return refuse_spans(trajectory, num_tokens=num_tokens, newest_version=newest_version)


def refuse_spans(trajectory: protos.Trajectory, *, num_tokens: int, newest_version: int) -> str:
    """Why the version spans cannot be right; empty where they can."""
    covered = 0
    for span in trajectory.spans:
        covered += span.num_tokens
        if span.policy_version > newest_version:
            return "version_from_the_future"
    return "" if covered == num_tokens else "spans_do_not_match_tokens"


def plausible(logprobs: bytes) -> bool:
    """Whether float32 bytes hold finite numbers that are not above 0 (but for rounding); NaN fails every comparison."""
    if len(logprobs) % 4 or not logprobs:
        return False
    values = np.frombuffer(logprobs, dtype="<f4")
    return bool(values.min() > -np.inf and values.max() <= 1e-3)


def refuse_reference(logprobs: protos.Array, trajectory: protos.Trajectory) -> str:
    """Why reference logprobs cannot be used; empty where they can."""
    num_tokens = trajectory.response_ids.shape[0]
    if length(logprobs, protos.DTYPE_FLOAT32) != num_tokens:
        return "reference_does_not_match_tokens"
    return "" if plausible(logprobs.data) else "reference_not_finite"


def length(array: protos.Array, dtype: int) -> int:
    """Elements of a one-dimensional array of the wanted dtype; -1 where it is something else."""
    shape = array.shape
    if array.dtype != dtype or len(shape) != 1 or shape[0] * ITEM_BYTES[dtype] != len(array.data):
        return -1
    return shape[0]
