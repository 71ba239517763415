"""What is asked of SGLang and what its answers mean; SGLang itself is not needed."""

from typing import Any

import pytest

from rollout.engine import Request
from rollout.engines.sglang_samples import ABORTED, VERSIONS, completion_of, rid_of, sampling_of, spans_of
from rollout.sampling import SamplingParams, StopReason, VersionSpan

END = 9


def request(**params: Any) -> Request:
    return Request(
        request_id=7, prompt_ids=(1, 2), sampling=SamplingParams(**({"max_tokens": 3} | params)), seed=(1 << 64) - 1
    )


def output(ids: list[int], reason: dict[str, Any], **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": reason,
            "output_token_logprobs": [(-0.5 * (at + 1), token, None) for at, token in enumerate(ids)],
            VERSIONS: [4] * len(ids),
            **meta,
        },
    }


def span(version: int, count: int) -> VersionSpan:
    return VersionSpan(policy_version=version, num_tokens=count)


def test_neighbours_of_one_version_are_one_span() -> None:
    assert spans_of([]) == ()
    assert spans_of([3, 3, 5]) == (span(3, 2), span(5, 1))
    assert spans_of([1, 2, 2, 2]) == (span(1, 1), span(2, 3))


def test_a_completion_has_tokens_logprobs_and_versions() -> None:
    got = completion_of(request(), output([5, 6, 7], {"type": "length"}, **{VERSIONS: [1, 1, 2]}), end_ids={END})
    assert (got.request_id, got.token_ids.tolist(), got.logprobs.tolist()) == (7, [5, 6, 7], [-0.5, -1.0, -1.5])
    assert (got.spans, got.stop_reason) == ((span(1, 2), span(2, 1)), StopReason.LENGTH)


@pytest.mark.parametrize(
    ("ids", "reason", "params", "expected"),
    [
        ([5, END], {"type": "stop", "matched": END}, {}, StopReason.EOS),
        ([5, 6], {"type": "stop", "matched": "x"}, {"stop": ("x",)}, StopReason.STOP),
        ([5, 6, 7], {"type": "length", "length": 3}, {}, StopReason.LENGTH),
        ([5, 6, END], {"type": "length", "length": 3}, {}, StopReason.EOS),
        ([5, 6, END], {"type": "length", "length": 3}, {"ignore_eos": True}, StopReason.LENGTH),
        ([5], {"type": "abort", "message": "Aborted"}, {}, StopReason.ABORTED),
    ],
)
def test_stop_reasons(ids: list[int], reason: dict[str, Any], params: dict[str, Any], expected: StopReason) -> None:
    assert completion_of(request(**params), output(ids, reason), end_ids={END}).stop_reason == expected


def test_an_unknown_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="ended a sample with"):
        completion_of(request(), output([5], {"type": "melted"}), end_ids={END})


def test_with_filters_the_logprobs_are_those_of_the_cut_distribution() -> None:
    told = output([5, 6], {"type": "length"}, output_token_sampling_logprobs=[-0.25, -0.125])
    assert completion_of(request(top_p=0.9), told, end_ids=()).logprobs.tolist() == [-0.25, -0.125]
    assert completion_of(request(top_p=0.9, temperature=0.0), told, end_ids=()).logprobs.tolist() == [-0.5, -1.0]


def test_a_finished_sample_of_unequal_parts_is_an_error_and_an_aborted_one_is_cut() -> None:
    short = {VERSIONS: [1]}
    with pytest.raises(ValueError, match="2 tokens, 2 logprobs and 1 versions"):
        completion_of(request(), output([5, 6], {"type": "length"}, **short), end_ids=())
    cut = completion_of(request(), output([5, 6], {"type": "abort"}, **short), end_ids=())
    assert (cut.token_ids.tolist(), cut.logprobs.tolist(), cut.spans) == ([5], [-0.5], (span(1, 1),))


def test_a_sample_that_has_not_begun_is_aborted_with_nothing() -> None:
    got = completion_of(request(), ABORTED, end_ids=())
    assert (len(got.token_ids), got.spans, got.stop_reason) == (0, (), StopReason.ABORTED)


def test_no_name_of_a_request_begins_with_another() -> None:
    names = [rid_of(number, attempt) for number in (1, 12, 2) for attempt in (0, 1, 10)]
    assert [(one, other) for one in names for other in names if one != other and other.startswith(one)] == []


def test_plain_sampling_asks_for_no_filters() -> None:
    params = sampling_of(request(stop=("a", "b")), end_ids={END, 3}, vocab_size=50, seeded=False)
    assert (params["top_k"], params["top_p"], params["max_new_tokens"]) == (-1, 1.0, 3)
    assert (params["stop"], params["stop_token_ids"], params["no_stop_trim"]) == (["a", "b"], [3, END], True)
    assert "sampling_seed" not in params


def test_top_p_alone_comes_with_a_top_k_of_everything() -> None:
    assert sampling_of(request(top_p=0.5), end_ids=(), vocab_size=50, seeded=False)["top_k"] == 50
    assert sampling_of(request(top_k=4), end_ids=(), vocab_size=50, seeded=False)["top_k"] == 4
    assert sampling_of(request(top_p=0.5, temperature=0.0), end_ids=(), vocab_size=50, seeded=False)["top_k"] == -1


def test_seeds_are_signed_and_end_tokens_may_be_ignored() -> None:
    params = sampling_of(request(ignore_eos=True), end_ids={END}, vocab_size=50, seeded=True)
    assert params["sampling_seed"] == (1 << 63) - 1
    assert params["ignore_eos"] and "stop_token_ids" not in params
