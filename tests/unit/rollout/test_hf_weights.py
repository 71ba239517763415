"""New weights in the middle of samples: exact spans, and each logprob under the weights that made its token."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from rollout.engine import Completion, Request
from rollout.engines.hf_core import HfCore
from rollout.sampling import SamplingParams, VersionSpan

PROMPTS = [(3, 4, 5), (6, 7, 8, 9, 10), (11,)]


def make_core(model: Any) -> HfCore:
    return HfCore(model, eos_ids=[], decode=None, max_num_seqs=8, max_model_len=64, max_prefill_tokens=16)


def requests() -> list[Request]:
    sampling = SamplingParams(max_tokens=7)
    return [Request(request_id=at, prompt_ids=one, sampling=sampling, seed=at) for at, one in enumerate(PROMPTS)]


def weights_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, one.detach()) for name, one in model.named_parameters())


def swap_after_three_tokens(old: Any, new: Any, mode: Any) -> dict[int, Completion]:
    core = make_core(copy.deepcopy(old))
    core.submit(requests())
    assert core.step() == [] and core.step() == []
    core.load_weights(5, weights_of(new), mode)
    done = []
    while core.busy:
        done += core.step()
    return {one.request_id: one for one in done}


def logprobs_of(logits: Tensor, tokens: Any) -> Tensor:
    return logits.log_softmax(-1).gather(1, torch.as_tensor(tokens, dtype=torch.int64)[:, None])[:, 0]


def spans(*pairs: tuple[int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(policy_version=version, num_tokens=count) for version, count in pairs)


@pytest.fixture
def models(build_model: Callable[..., Any]) -> tuple[Any, Any]:
    return build_model(seed=0), build_model(seed=1)


def test_recompute_goes_on_as_if_the_new_weights_had_read_everything(
    models: tuple[Any, Any], plain_logits: Callable[..., Tensor]
) -> None:
    old, new = models
    for at, one in swap_after_three_tokens(old, new, "recompute").items():
        assert one.spans == spans((0, 3), (5, 4))
        before = logprobs_of(plain_logits(old, PROMPTS[at], one.token_ids), one.token_ids)
        after = logprobs_of(plain_logits(new, PROMPTS[at], one.token_ids), one.token_ids)
        np.testing.assert_allclose(one.logprobs[:3], before[:3], atol=1e-5)
        np.testing.assert_allclose(one.logprobs[3:], after[3:], atol=1e-5)


def test_keep_goes_on_with_the_keys_and_values_of_the_old_weights(models: tuple[Any, Any]) -> None:
    old, new = models
    for at, one in swap_after_three_tokens(old, new, "keep").items():
        assert one.spans == spans((0, 3), (5, 4))
        cache = DynamicCache()
        response = torch.from_numpy(one.token_ids).long()[None]
        with torch.no_grad():
            read_by_old = torch.cat([torch.tensor([PROMPTS[at]]), response[:, :2]], dim=1)
            early = old(input_ids=read_by_old, past_key_values=cache, use_cache=True).logits[0, -3:]
            late = new(input_ids=response[:, 2:-1], past_key_values=cache, use_cache=True).logits[0]
        np.testing.assert_allclose(one.logprobs, logprobs_of(torch.cat([early, late]), one.token_ids), atol=1e-5)


def test_restart_gives_the_samples_that_the_new_weights_give_from_the_start(models: tuple[Any, Any]) -> None:
    old, new = models
    core = make_core(copy.deepcopy(new))
    core.submit(requests())
    fresh = []
    while core.busy:
        fresh += core.step()
    restarted = swap_after_three_tokens(old, new, "restart")
    for one in fresh:
        assert restarted[one.request_id].token_ids.tolist() == one.token_ids.tolist()
        assert restarted[one.request_id].logprobs.tobytes() == one.logprobs.tobytes()
        assert restarted[one.request_id].spans == spans((5, 7))


def test_two_swaps_between_two_tokens_leave_no_empty_span(models: tuple[Any, Any]) -> None:
    core = make_core(copy.deepcopy(models[0]))
    core.submit(requests()[:1])
    core.step()
    core.load_weights(1, weights_of(models[1]), "keep")
    core.load_weights(2, weights_of(models[0]), "recompute")
    done = []
    while core.busy:
        done += core.step()
    assert done[0].spans == spans((0, 2), (2, 5))


def test_weights_that_do_not_fit_are_refused_whole(models: tuple[Any, Any]) -> None:
    core = make_core(copy.deepcopy(models[0]))
    before = [one.clone() for one in core.model.parameters()]
    good = dict(weights_of(models[1]))
    first, *_, last = good
    bad: list[tuple[dict[str, Tensor], str]] = [
        (good | {"model.nowhere": good[last]}, "no parameter model.nowhere"),
        (good | {last: good[last][..., :1]}, f"{last} has shape"),
        (good | {last: good[last].double()}, f"{last} has dtype float64, not float32"),
        ({}, "no tensors"),
    ]
    for tensors, message in bad:
        with pytest.raises(ValueError, match=message):
            core.load_weights(1, tensors.items(), "keep")
    with pytest.raises(ValueError, match="comes twice"):
        core.load_weights(1, [(first, good[first])] * 2, "keep")
    assert core.policy_version == 0
    assert all(torch.equal(one, two) for one, two in zip(before, core.model.parameters(), strict=True))


def test_tied_weights_are_listed_once_and_answer_to_both_names(build_model: Callable[..., Any]) -> None:
    model = build_model(tie_word_embeddings=True)
    core = make_core(model)
    names = [name for name, _, _ in core.parameters()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert core.parameters()[0] == ("model.embed_tokens.weight", "float32", (32, 32))
    core.load_weights(1, [("lm_head.weight", torch.ones(32, 32))], "keep")
    assert torch.equal(model.model.embed_tokens.weight, torch.ones(32, 32))
