"""What comes back from a rollout server is checked before anything is believed. A bad sample is data, with a reason."""

from __future__ import annotations

import numpy as np

import protos
from protos.arrays import from_array

ITEM_BYTES = {protos.DTYPE_INT32: 4, protos.DTYPE_FLOAT32: 4, protos.DTYPE_UINT8: 1}


def refuse(trajectory: protos.Trajectory, *, newest_version: int) -> str:
    """Why a trajectory cannot be trained on; empty where it can. Looks at shapes, and at numbers only for NaN."""
    num_tokens = length(trajectory.response_ids, protos.DTYPE_INT32)
    if num_tokens < 0 or length(trajectory.prompt_ids, protos.DTYPE_INT32) <= 0:
        return "malformed_ids"
    if num_tokens == 0:
        return "empty"
    if length(trajectory.behaviour_logprobs, protos.DTYPE_FLOAT32) != num_tokens:
        return "logprobs_do_not_match_tokens"
    if trajectory.HasField("loss_mask") and length(trajectory.loss_mask, protos.DTYPE_UINT8) != num_tokens:
        return "mask_does_not_match_tokens"
    if sum(span.num_tokens for span in trajectory.spans) != num_tokens:
        return "spans_do_not_match_tokens"
    if any(span.policy_version > newest_version for span in trajectory.spans):
        return "version_from_the_future"
    logprobs = from_array(trajectory.behaviour_logprobs)
    if not np.isfinite(logprobs).all() or logprobs.max() > 1e-3:
        return "logprobs_not_finite"
    return ""


def refuse_reference(logprobs: protos.Array, trajectory: protos.Trajectory) -> str:
    """Why reference logprobs cannot be used; empty where they can."""
    num_tokens = trajectory.response_ids.shape[0]
    if length(logprobs, protos.DTYPE_FLOAT32) != num_tokens:
        return "reference_does_not_match_tokens"
    return "" if np.isfinite(from_array(logprobs)).all() else "reference_not_finite"


def length(array: protos.Array, dtype: int) -> int:
    """Elements of a one-dimensional array of the wanted dtype; -1 where it is something else."""
    if array.dtype != dtype or len(array.shape) != 1 or array.shape[0] * ITEM_BYTES[dtype] != len(array.data):
        return -1
    return array.shape[0]
