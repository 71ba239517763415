"""The iterations of the built-in engine, checked against plain forward passes of transformers."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engine import Completion, Request
from rollout.engines.hf_core import HfCore
from rollout.sampling import SamplingParams, StopReason, VersionSpan, sample, uniforms

PROMPTS = [(3, 4, 5), (6, 7, 8, 9, 10), (11,), (12, 13, 14, 15)]


def make_core(model: Any, *, eos_ids: Sequence[int] = (), max_num_seqs: int = 8, **settings: Any) -> HfCore:
    defaults: dict[str, Any] = dict(decode=None, max_model_len=64, max_prefill_tokens=64)
    return HfCore(model, eos_ids=eos_ids, max_num_seqs=max_num_seqs, **(defaults | settings))


def request(request_id: int, prompt: Any = (3, 4, 5), *, seed: int | None = None, **params: Any) -> Request:
    sampling = SamplingParams(**({"max_tokens": 6} | params))
    return Request(
        request_id=request_id, prompt_ids=prompt, sampling=sampling, seed=request_id if seed is None else seed
    )


def drain(core: HfCore) -> dict[int, Completion]:
    done: list[Completion] = []
    while core.busy:
        done += core.step()
    return {one.request_id: one for one in done}


def run(core: HfCore, *requests: Request) -> dict[int, Completion]:
    core.submit(requests)
    return drain(core)


def expected(logits_BV: Tensor, one: Request, *, start: int = 0) -> tuple[list[int], Tensor]:
    """Tokens and logprobs that `sample` draws from these logits, token `start` of the response first."""
    size = logits_BV.shape[0]
    index_B = torch.arange(start, start + size)
    token_B, logprob_B = sample(
        logits_BV,
        uniform_B=uniforms(torch.full((size,), one.seed), index_B=index_B),
        temperature=torch.full((size,), one.sampling.temperature),
        top_k_B=torch.full((size,), one.sampling.top_k),
        top_p_B=torch.full((size,), one.sampling.top_p),
    )
    return token_B.tolist(), logprob_B


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_greedy_equals_generate_of_transformers(kind: str, build_model: Callable[..., Any]) -> None:
    model = build_model(kind)
    done = run(
        make_core(copy.deepcopy(model), max_num_seqs=3),
        *[request(at, prompt, temperature=0.0, max_tokens=10) for at, prompt in enumerate(PROMPTS)],
    )
    for at, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, eos_token_id=None
        )
        assert done[at].token_ids.tolist() == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.6}]
)
def test_tokens_and_logprobs_are_those_of_a_plain_forward_pass(
    params: dict[str, Any], build_model: Callable[..., Any], plain_logits: Callable[..., Tensor]
) -> None:
    model = build_model()
    requests = [request(at, PROMPTS[at % 4], max_tokens=8 + at % 3, **params) for at in range(10)]
    done = run(make_core(copy.deepcopy(model), max_num_seqs=4), *requests)
    for one in requests:
        got = done[one.request_id]
        tokens, logprobs = expected(plain_logits(model, one.prompt_ids, got.token_ids), one)
        assert got.token_ids.tolist() == tokens
        np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-5)
        assert got.spans == (VersionSpan(policy_version=0, num_tokens=len(tokens)),)


def test_one_batch_may_mix_greedy_filtered_and_plain_samples(
    build_model: Callable[..., Any], plain_logits: Callable[..., Tensor]
) -> None:
    model = build_model()
    requests = [request(0, temperature=0.0), request(1, temperature=0.5, top_k=3), request(2), request(3, top_p=0.5)]
    done = run(make_core(copy.deepcopy(model)), *requests)
    for one in requests:
        tokens, logprobs = expected(plain_logits(model, one.prompt_ids, done[one.request_id].token_ids), one)
        assert done[one.request_id].token_ids.tolist() == tokens
        np.testing.assert_allclose(done[one.request_id].logprobs, logprobs, atol=1e-5)


def test_a_model_that_does_not_run_on_sdpa_is_served_as_it_is(
    build_model: Callable[..., Any], plain_logits: Callable[..., Tensor]
) -> None:
    model = build_model(attn_implementation="eager")
    done = run(make_core(copy.deepcopy(model)), request(0), request(1, PROMPTS[1]))
    tokens, logprobs = expected(plain_logits(model, PROMPTS[1], done[1].token_ids), request(1, PROMPTS[1]))
    assert done[1].token_ids.tolist() == tokens
    np.testing.assert_allclose(done[1].logprobs, logprobs, atol=1e-5)


def test_tokens_depend_neither_on_neighbours_nor_on_the_time_of_admission(build_model: Callable[..., Any]) -> None:
    model = build_model()
    one = request(7, PROMPTS[1], max_tokens=12)
    alone = run(make_core(copy.deepcopy(model)), one)[7]
    core = make_core(copy.deepcopy(model), max_num_seqs=4)
    others = [request(100 + at, PROMPTS[at % 4], max_tokens=3 + at) for at in range(9)]
    core.submit(others[:6])
    done = core.step() + core.step()
    core.submit([*others[6:], one])
    crowded = {found.request_id: found for found in done} | drain(core)
    assert crowded[7].token_ids.tolist() == alone.token_ids.tolist()
    np.testing.assert_allclose(crowded[7].logprobs, alone.logprobs, atol=1e-5)
    assert sorted(crowded) == [7, *range(100, 109)]


def test_another_seed_gives_another_sample_and_the_same_seed_the_same(build_model: Callable[..., Any]) -> None:
    core = make_core(build_model())
    seeds = [5, 6, 5, 2**64 - 1]
    done = run(core, *[request(at, seed=seed, max_tokens=12) for at, seed in enumerate(seeds)])
    tokens = [done[at].token_ids.tolist() for at in range(4)]
    assert tokens[0] == tokens[2]
    assert tokens[0] != tokens[1] and tokens[0] != tokens[3]


def test_the_same_calls_give_the_same_bits(build_model: Callable[..., Any]) -> None:
    requests = [request(at, PROMPTS[at % 4], max_tokens=2 + at) for at in range(12)]
    first, second = (run(make_core(build_model(), max_num_seqs=5), *requests) for _ in range(2))
    assert list(first) == list(second)
    for at in first:
        assert first[at].token_ids.tobytes() == second[at].token_ids.tobytes()
        assert first[at].logprobs.tobytes() == second[at].logprobs.tobytes()


def test_a_prompt_shared_by_a_group_is_prefilled_once(build_model: Callable[..., Any]) -> None:
    model = build_model()
    core = make_core(model)
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    as_array = np.array([3, 4, 5], dtype=np.int32)
    run(
        core,
        *[request(at, max_tokens=2) for at in range(4)],
        *[request(4 + at, (6, 7, 8), max_tokens=2) for at in range(4)],
    )
    assert shapes == [(2, 3), (8, 1)]
    shapes.clear()
    run(core, request(0, as_array, max_tokens=1), request(1, as_array.copy(), max_tokens=1))
    assert shapes == [(1, 3)]


def test_prefill_is_cut_into_passes_of_the_token_budget(build_model: Callable[..., Any]) -> None:
    model = build_model()
    core = make_core(model, max_prefill_tokens=8)
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    requests = [request(at, prompt, max_tokens=1) for at, prompt in enumerate([*PROMPTS, tuple(range(3, 15))])]
    cut = run(core, *requests)
    assert shapes == [(2, 3), (1, 4), (1, 5), (1, 12)]
    whole = run(make_core(build_model(), max_prefill_tokens=1000), *requests)
    assert [cut[at].token_ids.tolist() for at in range(5)] == [whole[at].token_ids.tolist() for at in range(5)]


def test_new_samples_join_and_leave_between_any_two_tokens(build_model: Callable[..., Any]) -> None:
    core = make_core(build_model(), max_num_seqs=8)
    core.submit([request(0, max_tokens=8)])
    assert core.step() == []  # two tokens: one of prefill, one of decode
    core.submit([request(1, max_tokens=3)])
    assert core.step() == []
    assert [one.request_id for one in core.step()] == [1]
    assert list(drain(core)) == [0]


def test_the_end_of_sequence_token_ends_a_sample_unless_it_is_ignored(build_model: Callable[..., Any]) -> None:
    model = build_model()
    free = run(make_core(copy.deepcopy(model)), request(0, max_tokens=10))[0].token_ids.tolist()
    end = free[3]
    until = free.index(end) + 1
    done = run(
        make_core(copy.deepcopy(model), eos_ids=[end, 31]),
        request(0, max_tokens=10),
        request(1, seed=0, max_tokens=10, ignore_eos=True),
    )
    assert (done[0].token_ids.tolist(), done[0].stop_reason) == (free[:until], StopReason.EOS)
    assert (done[1].token_ids.tolist(), done[1].stop_reason) == (free, StopReason.LENGTH)


def test_an_end_of_sequence_token_at_the_last_place_counts_as_such(build_model: Callable[..., Any]) -> None:
    model = build_model()
    end = run(make_core(copy.deepcopy(model)), request(0, max_tokens=1))[0].token_ids.tolist()
    assert run(make_core(copy.deepcopy(model), eos_ids=end), request(0, max_tokens=1))[0].stop_reason == StopReason.EOS


def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(build_model: Callable[..., Any]) -> None:
    model = build_model()

    def decode(sequences: list[list[int]]) -> list[str]:
        return ["".join(f"<{token}>" for token in sequence) for sequence in sequences]

    free = run(make_core(copy.deepcopy(model)), request(0, max_tokens=10))[0].token_ids.tolist()
    stop = f"{free[2]}><{free[3]}"
    done = run(
        make_core(copy.deepcopy(model), decode=decode),
        request(0, max_tokens=10, stop=("nowhere", stop)),
        request(1, seed=0, max_tokens=10),
    )
    assert (done[0].token_ids.tolist(), done[0].stop_reason) == (free[:4], StopReason.STOP)
    assert (done[1].token_ids.tolist(), done[1].stop_reason) == (free, StopReason.LENGTH)


def test_aborted_samples_come_out_with_what_they_have(build_model: Callable[..., Any]) -> None:
    core = make_core(build_model(), max_num_seqs=2)
    whole = run(make_core(build_model()), *[request(at, max_tokens=9) for at in range(3)])
    core.submit([request(at, max_tokens=9) for at in range(3)])
    core.step()
    aborted = {one.request_id: one for one in core.abort([0, 2, 99])}
    assert {at: one.stop_reason for at, one in aborted.items()} == {0: StopReason.ABORTED, 2: StopReason.ABORTED}
    assert aborted[0].token_ids.tolist() == whole[0].token_ids[:2].tolist()
    assert (len(aborted[2].token_ids), aborted[2].spans) == (0, ())
    rest = drain(core)
    assert list(rest) == [1]
    assert rest[1].token_ids.tolist() == whole[1].token_ids.tolist()


def test_logits_that_are_not_finite_are_an_error_and_not_a_sample(build_model: Callable[..., Any]) -> None:
    model = build_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    core = make_core(model)
    core.submit([request(0)])
    with pytest.raises(RuntimeError, match="not finite"):
        drain(core)


def test_sleep_frees_the_slots_and_what_was_under_way_goes_on_after_it(build_model: Callable[..., Any]) -> None:
    asked = [request(at, prompt, max_tokens=12) for at, prompt in enumerate(PROMPTS)]
    expected = run(make_core(build_model()), *asked)
    core = make_core(build_model())
    core.submit(asked)
    done = [one for _ in range(4) for one in core.step()]
    assert done == [] and core._cache.num_bytes > 0
    core.sleep()
    assert core._cache.num_bytes == 0 and not core.busy
    core.wake()
    found = drain(core)
    assert found.keys() == expected.keys()
    for at, one in found.items():
        assert one.token_ids.tolist() == expected[at].token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, expected[at].logprobs, atol=1e-4)
