"""A sample in SGLang's words and in ours: what is asked, what comes back. Imports no SGLang."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from rollout.engine import Completion, Request
from rollout.sampling import SamplingParams, StopReason, VersionSpan

VERSIONS = "offbeat_versions"
"""Key of meta_info: policy_version of each output token."""
MAX_SEED = (1 << 63) - 1
Output = Mapping[str, Any]
ABORTED: Output = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
"""Of a sample that SGLang has not seen yet."""


def rid_of(request_id: int, attempt: int) -> str:
    """SGLang aborts every request whose id begins with the given one: the dot at the end keeps 1 from being 12."""
    return f"{request_id}.{attempt}."


def sampling_of(request: Request, *, end_ids: Collection[int], vocab_size: int, seeded: bool) -> dict[str, Any]:
    """SGLang's sampling_params. It gives logprobs of the cut distribution only where top_k is a finite number."""
    sampling = request.sampling
    everything = vocab_size if sampling.filters else -1
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else everything,
        "ignore_eos": sampling.ignore_eos,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if not sampling.ignore_eos:
        params["stop_token_ids"] = sorted(end_ids)
    if seeded:
        params["sampling_seed"] = request.seed & MAX_SEED
    return params


def completion_of(request: Request, output: Output, *, end_ids: Collection[int]) -> Completion:
    """Without the text. ValueError where tokens, logprobs and versions are not equally many."""
    ids = list(output["output_ids"])
    meta = output["meta_info"]
    stop_reason = stop_reason_of(meta["finish_reason"], ids, sampling=request.sampling, end_ids=end_ids)
    logprobs = logprobs_of(meta, request.sampling)
    versions = list(meta.get(VERSIONS, ()))
    if stop_reason is StopReason.ABORTED:  # from the queue: SGLang says neither versions nor the last few tokens
        num_tokens = min(len(ids), len(logprobs), len(versions))
        ids, logprobs, versions = ids[:num_tokens], logprobs[:num_tokens], versions[:num_tokens]
    if not len(ids) == len(logprobs) == len(versions):
        raise ValueError(f"SGLang gave {len(ids)} tokens, {len(logprobs)} logprobs and {len(versions)} versions")
    return Completion(
        request_id=request.request_id,
        token_ids=np.asarray(ids, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        spans=spans_of(versions),
        stop_reason=stop_reason,
        text=None,
    )


def stop_reason_of(
    finish_reason: Mapping[str, Any], ids: Sequence[int], *, sampling: SamplingParams, end_ids: Collection[int]
) -> StopReason:
    """SGLang looks at the length first: an end-of-sequence token in the last place is length to it, the end to us."""
    kind, matched = finish_reason["type"], finish_reason.get("matched")
    if kind == "stop":
        return StopReason.STOP if isinstance(matched, str) else StopReason.EOS
    if kind == "length":
        ended = bool(ids) and not sampling.ignore_eos and ids[-1] in end_ids
        return StopReason.EOS if ended else StopReason.LENGTH
    if kind == "abort":
        return StopReason.ABORTED
    raise ValueError(f"SGLang ended a sample with {dict(finish_reason)}")


def logprobs_of(meta: Mapping[str, Any], sampling: SamplingParams) -> list[float]:
    """Of the sampling distribution: SGLang's plain ones know the temperature but neither top_p nor top_k."""
    if sampling.filters:
        return list(meta.get("output_token_sampling_logprobs", ()))
    return [one[0] for one in meta.get("output_token_logprobs", ())]


def spans_of(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version together."""
    return tuple(
        VersionSpan(policy_version=version, num_tokens=len(list(tokens))) for version, tokens in groupby(versions)
    )
