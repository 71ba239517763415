"""Scores of 32,768 tokens over 151,936 words, forward and backward with the entropy's gradient, in under 2 GB.

N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trainer.model.logprobs import score_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
TOKENS, VOCABULARY = 32_768, 151_936
BOUND = 2_000_000_000
"""Bytes beside hidden states, head, targets and the two gradients."""


@pytest.fixture(autouse=True)
def clean_card() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.compiler.reset()


def task(tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    hidden_ND = torch.randn(tokens, hidden, generator=draw, device="cuda", dtype=torch.bfloat16)
    weight_VD = torch.randn(VOCABULARY, hidden, generator=draw, device="cuda", dtype=torch.bfloat16) * (2 / hidden**0.5)
    targets_N = torch.randint(VOCABULARY, (tokens,), generator=draw, device="cuda")
    return hidden_ND.requires_grad_(), weight_VD.requires_grad_(), targets_N


def gradients(logprobs_N: Tensor, entropy_N: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    assert entropy_N is not None
    weights_N = torch.linspace(-1, 2, len(logprobs_N), device="cuda")
    return torch.autograd.grad(logprobs_N @ weights_N + 0.1 * entropy_N.sum(), inputs)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("hidden", [1024, 2560])
def test_memory_above_hidden_states_head_and_gradients(hidden: int, compiled: bool) -> None:
    hidden_ND, weight_VD, targets_N = task(TOKENS, hidden)
    for _ in range(2):  # compiling may take more
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = score_tokens(hidden_ND, weight_VD, targets_N, entropy="gradient", compiled=compiled)
        gradients(*found[:2], hidden_ND, weight_VD)
        torch.cuda.synchronize()
        above = torch.cuda.max_memory_allocated() - before - hidden_ND.nbytes - weight_VD.nbytes
        del found
    print(f"D={hidden} compiled={compiled}: {above / 2**20:.0f} MiB above")
    assert 0 < above < BOUND


@pytest.mark.timeout(600)
@pytest.mark.parametrize("compiled", [False, True])
def test_many_blocks_give_what_all_logits_at_once_give(compiled: bool) -> None:
    hidden_ND, weight_VD, targets_N = task(3000, 1024)
    logprobs_NV = (hidden_ND @ weight_VD.T).float().log_softmax(-1)
    expected = (logprobs_NV.gather(1, targets_N[:, None])[:, 0], -(logprobs_NV.exp() * logprobs_NV).sum(-1))
    found = score_tokens(hidden_ND, weight_VD, targets_N, entropy="gradient", compiled=compiled, max_logits_mib=64)
    for ours, plain in zip(found[:2], expected, strict=True):
        assert ours is not None and (ours - plain).abs().mean() < 1e-3
        assert (ours - plain).abs().max() < 0.07, "a logit below 16 may be rounded to its other neighbour"
    theirs = gradients(*expected, hidden_ND, weight_VD)
    for ours, plain in zip(gradients(*found[:2], hidden_ND, weight_VD), theirs, strict=True):
        assert (ours - plain).float().norm() / plain.float().norm() < 0.01
