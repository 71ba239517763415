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
from trainer.logprobs import TokenScorer
from trainer.packing import micro_batch, pack
from trainer.reference import ReferencePolicy

torch.set_num_threads(1)


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


def test_a_micro_batch_points_one_to_the_left_of_each_counted_token() -> None:
    masked = trajectory([4], [5, 6, 7], loss_mask=np.array([1, 0, 1], np.uint8))
    batch = collate([trajectory([1, 2], [3]), masked, trajectory([1], [2] * 6)])
    micro = micro_batch(batch, torch.tensor([1, 0]), device=torch.device("cpu"))
    assert micro.input_ids_BT.tolist() == [[4, 5, 6], [1, 2, 3]], "the last column predicts nothing"
    assert micro.positions_N.tolist() == [0, 2, 4]
    assert micro.targets_N.tolist() == [5, 7, 3]
    assert micro.scatter(torch.tensor([10.0, 20.0, 30.0])).tolist() == [[10, 0, 20], [30, 0, 0]]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 120))
def test_packing_takes_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    parts = pack(lengths_B, max_tokens=budget)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * int(lengths_B[part].max()) <= budget


@pytest.mark.parametrize("max_logits_mib", [256, 0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_the_log_softmax_of_the_whole_model_in_blocks_of_any_size(
    max_logits_mib: int, temperature: float
) -> None:
    model = tiny_model()
    ids_BT = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))
    positions_N, targets_N = torch.tensor([0, 3, 7, 12]), torch.tensor([1, 10, 0, 4])
    logits_NV = model(input_ids=ids_BT).logits.flatten(0, 1)[positions_N] / temperature
    expected_NV = logits_NV.log_softmax(-1)
    scorer = TokenScorer(model, temperature=temperature, max_logits_mib=max_logits_mib)
    found = scorer(ids_BT, positions_N, targets_N, entropy="gradient", square_sums=True)
    expected = (expected_NV[torch.arange(4), targets_N], -(expected_NV.exp() * expected_NV).sum(-1))
    assert found.entropy_N is not None and found.square_sums_N is not None
    torch.testing.assert_close(found.logprobs_N, expected[0])
    torch.testing.assert_close(found.square_sums_N, expected_NV.exp().square().sum(-1))
    assert not found.square_sums_N.requires_grad
    torch.testing.assert_close(found.entropy_N, expected[1])
    weight = next(model.parameters())
    (ours,) = torch.autograd.grad(found.logprobs_N.sum() + found.entropy_N.sum(), weight)
    (theirs,) = torch.autograd.grad(expected[0].sum() + expected[1].sum(), weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Capped(nn.Module):
    """A model whose logits are more than its head's output, as in Gemma 2."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.model, self.lm_head = inner, inner.model, inner.lm_head

    def forward(self, **inputs: Any) -> Any:
        outputs = self.inner(**inputs)
        outputs.logits = 0.5 * torch.tanh(outputs.logits / 0.5)
        return outputs


def test_a_model_that_caps_its_logits_is_run_whole() -> None:
    model = Capped(tiny_model())
    ids_BT = torch.tensor([[1, 2, 3]])
    found = TokenScorer(model)(ids_BT, torch.tensor([1]), torch.tensor([3]))
    assert found.logprobs_N.item() == pytest.approx(model(input_ids=ids_BT).logits[0, 1].log_softmax(-1)[3].item())


def test_detached_entropy_has_no_gradient_and_none_is_none() -> None:
    scorer = TokenScorer(tiny_model())
    arguments = torch.tensor([[1, 2, 3]]), torch.tensor([1]), torch.tensor([3])
    entropy_N = scorer(*arguments, entropy="detached").entropy_N
    assert entropy_N is not None and not entropy_N.requires_grad
    assert scorer(*arguments).entropy_N is None
    assert scorer(*arguments).square_sums_N is None


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
