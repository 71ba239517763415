"""Collation, packing, logprobs and the reference policy. B samples, T tokens, R response tokens, N chosen positions."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.batch import Trajectory, collate
from trainer.model.policy import Policy
from trainer.packing import micro_batch, pack
from trainer.reference import ReferencePolicy

torch.set_num_threads(1)
CPU = torch.device("cpu")


def trajectory(prompt: list[int], response: list[int], **more: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "sample": "a",
        "group": 0,
        "prompt_ids": np.array(prompt, np.int32),
        "response_ids": np.array(response, np.int32),
        "behaviour_logprobs": -np.arange(1, len(response) + 1, dtype=np.float32),
        "reward": 1.0,
        "spans": ((0, len(response)),),
        "stop_reason": "stop",
    }
    return Trajectory(**fields | more)


def tiny_model(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "initializer_range": 0.5}
    model: nn.Module = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **more)).eval()
    return model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": np.array([], np.int32)}, "empty prompt"),
        ({"behaviour_logprobs": np.zeros(3, np.float32)}, r"behaviour_logprobs has shape \(3,\) for 2"),
        ({"behaviour_logprobs": np.array([0, np.nan], np.float32)}, "behaviour_logprobs is not finite"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"spans": ((0, 1),)}, "do not cover 2"),
    ],
)
def test_a_trajectory_whose_parts_do_not_fit_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"trajectory a: .*{message}"):
        trajectory([1], [2, 3], **fields)


def test_collation_pads_on_the_right_and_aligns_responses_on_the_left() -> None:
    batch = collate([trajectory([1, 2], [3], loss_mask=np.array([1], np.uint8)), trajectory([4], [5, 6, 7])])
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert batch.mask_BR.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.behaviour_logprobs_BR.tolist() == [[-1, 0, 0], [-1, -2, -3]]
    assert batch.reference_logprobs_BR is None


def test_a_micro_batch_holds_no_padding_and_points_one_to_the_left_of_each_counted_token() -> None:
    masked = trajectory([4], [5, 6, 7], loss_mask=np.array([1, 0, 1], np.uint8))
    batch = collate([trajectory([1, 2], [3]), masked, trajectory([1], [2] * 6)])
    micro = micro_batch(batch, torch.tensor([1, 0]), device=CPU)
    tokens = micro.tokens
    assert tokens.input_ids_1T.tolist() == [[4, 5, 6, 1, 2]], "the last token of a sample predicts nothing"
    assert tokens.position_ids_1T.tolist() == [[0, 1, 2, 0, 1]]
    assert (tokens.cu_seqlens.tolist(), tokens.cu_seqlens.dtype, tokens.max_length) == ([0, 3, 5], torch.int32, 3)
    assert tokens.positions_N.tolist() == [0, 2, 4]
    assert tokens.targets_N.tolist() == [5, 7, 3]
    assert micro.scatter(torch.tensor([10.0, 20.0, 30.0])).tolist() == [[10, 0, 20], [30, 0, 0]]


@pytest.mark.parametrize("model_of", ["qwen3", "capped"])
def test_a_micro_batch_without_rows_runs_and_gives_every_weight_a_gradient_of_zeros(model_of: str) -> None:
    model = tiny_model() if model_of == "qwen3" else Capped(tiny_model())
    micro = micro_batch(collate([trajectory([1], [2])]), torch.zeros(0, dtype=torch.int64), device=CPU)
    scores = Policy(model)(micro.tokens, entropy="detached")
    assert micro.idle and scores.logprobs_N.shape == (0,)
    (scores.logprobs_N.sum() * 0.0).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 120), ranks=st.integers(1, 5))
def test_packing_takes_every_sample_once_within_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    by_rank = pack(lengths_B, max_tokens=budget, ranks=ranks)
    parts = [part for parts in by_rank for part in parts]
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    assert all(len(part) <= 1 or int(lengths_B[part].sum()) <= budget for part in parts)
    assert len(by_rank) == ranks and len({len(parts) for parts in by_rank}) == 1


def test_ranks_get_tokens_of_like_number() -> None:
    lengths_B = torch.from_numpy(np.random.default_rng(0).integers(20, 400, 64))
    by_rank = pack(lengths_B, max_tokens=2048, ranks=4)
    loads = [sum(int(lengths_B[part].sum()) for part in parts) for parts in by_rank]
    assert max(loads) / min(loads) < 1.02
    assert pack(torch.tensor([3, 5]), max_tokens=8, ranks=2) == [[torch.tensor([1])], [torch.tensor([0])]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_scores_are_those_of_each_sample_alone(temperature: float) -> None:
    model = tiny_model()
    samples = [trajectory([1, 2], [3, 0]), trajectory([4], [5, 6, 7]), trajectory([1], [2] * 6)]
    micro = micro_batch(collate(samples), torch.tensor([2, 0, 1]), device=CPU)
    found = Policy(model, temperature=temperature)(micro.tokens, entropy="gradient", square_sums=True)
    expected_NV = torch.cat([alone(model, samples[row], temperature) for row in (2, 0, 1)])
    logprobs_N = expected_NV.gather(1, micro.tokens.targets_N[:, None])[:, 0]
    entropy_N = -(expected_NV.exp() * expected_NV).sum(-1)
    assert found.entropy_N is not None and found.square_sums_N is not None
    torch.testing.assert_close(found.logprobs_N, logprobs_N)
    torch.testing.assert_close(found.entropy_N, entropy_N)
    torch.testing.assert_close(found.square_sums_N, expected_NV.exp().square().sum(-1))
    weight = next(model.parameters())
    (ours,) = torch.autograd.grad(found.logprobs_N.sum() + found.entropy_N.sum(), weight)
    (theirs,) = torch.autograd.grad(logprobs_N.sum() + entropy_N.sum(), weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def alone(model: nn.Module, sample: Trajectory, temperature: float) -> torch.Tensor:
    """Log-softmax at every response token, [n, V], of one sample in a forward of its own."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


class Capped(nn.Module):
    """A model whose logits are more than its head's output, as in Gemma 2."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.model, self.lm_head = inner, inner.model, inner.lm_head
        self.config = inner.config

    def forward(self, **inputs: Any) -> Any:
        outputs = self.inner(**inputs)
        outputs.logits = 0.5 * torch.tanh(outputs.logits / 0.5)
        return outputs


def test_a_model_that_caps_its_logits_is_run_whole() -> None:
    model, sample = Capped(tiny_model()), trajectory([1, 2], [3])
    found = Policy(model)(micro_batch(collate([sample]), torch.tensor([0]), device=CPU).tokens)
    assert found.logprobs_N.item() == pytest.approx(alone(model, sample, 1.0)[0, 3].item())
    assert found.entropy_N is None and found.square_sums_N is None


@pytest.mark.parametrize("max_tokens", [1, 9, 1000])
def test_the_reference_scores_each_response_alone_and_in_order(max_tokens: int) -> None:
    model = tiny_model()
    prompts = [np.array(ids, np.int32) for ids in ([1, 2], [3], [1, 2], [4, 5, 6, 7])]
    responses = [np.array(ids, np.int32) for ids in ([3], [1, 2, 3, 4], [9, 8], [10])]
    found = ReferencePolicy(model, max_tokens).logprobs(prompts, responses)
    for prompt, response, scores in zip(prompts, responses, found, strict=True):
        ids_T = torch.from_numpy(np.concatenate([prompt, response])).long()
        logprobs_TV = model(input_ids=ids_T[None]).logits[0].log_softmax(-1)
        expected = [logprobs_TV[len(prompt) + i - 1, token].item() for i, token in enumerate(response)]
        assert scores.dtype == np.float32
        assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert ReferencePolicy(model, max_tokens).logprobs([], []) == []
