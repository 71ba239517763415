"""What vLLM says about a sample, in our words: version spans, stop reason, behaviour logprobs. Imports no vLLM."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollout.engine import Completion
from rollout.sampling import StopReason, VersionSpan

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

MAX_SEED = (1 << 63) - 1


def spans_of(starts: Sequence[tuple[int, int]], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Spans from (policy_version, index of its first token) in order; a version without tokens has none."""
    ends = [start for _, start in starts[1:]] + [num_tokens]
    return tuple(
        VersionSpan(policy_version=version, num_tokens=min(end, num_tokens) - start)
        for (version, start), end in zip(starts, ends, strict=True)
        if min(end, num_tokens) > start
    )


def stop_reason_of(finish_reason: str | None, stop_reason: int | str | None) -> StopReason:
    """vLLM names a stop string by itself, one of several end tokens by its id, and the tokenizer's own by nothing.

    ValueError for what is no regular end.
    """
    if finish_reason == "stop":
        return StopReason.STOP if isinstance(stop_reason, str) else StopReason.EOS
    if finish_reason == "length":
        return StopReason.LENGTH
    if finish_reason == "abort":
        return StopReason.ABORTED
    raise ValueError(f"vLLM ended a sample with {finish_reason} ({stop_reason})")


def logprobs_of(output: "CompletionOutput") -> npt.NDArray[np.float32]:
    """Behaviour logprobs of the sampled tokens, float32 (n)."""
    flat = output.logprobs
    if flat is None:
        return np.zeros(0, dtype=np.float32)
    first = flat.start_indices  # the sampled token comes first at each position
    values = flat.logprobs if len(first) == len(flat.logprobs) else [flat.logprobs[index] for index in first]
    return np.asarray(values, dtype=np.float32)


def vllm_seed(seed: int) -> int:
    """vLLM keeps seeds as signed 64-bit numbers, and takes -1 for none."""
    return seed & MAX_SEED


def completion_of(request_id: int, output: "CompletionOutput", starts: Sequence[tuple[int, int]]) -> Completion:
    """Without the text. ValueError if the sample did not end as samples do."""
    token_ids = np.asarray(output.token_ids, dtype=np.int32)
    return Completion(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=logprobs_of(output),
        spans=spans_of(starts, len(token_ids)),
        stop_reason=stop_reason_of(output.finish_reason, output.stop_reason),
        text=None,
    )


def aborted(request_id: int) -> Completion:
    """A sample that was ended before its first token."""
    return Completion(
        request_id=request_id,
        token_ids=np.zeros(0, dtype=np.int32),
        logprobs=np.zeros(0, dtype=np.float32),
        spans=(),
        stop_reason=StopReason.ABORTED,
        text=None,
    )
