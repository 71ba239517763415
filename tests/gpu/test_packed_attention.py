"""PyTorch's variable-length kernel on a card: as exact as sdpa on each sequence alone, no mask, no waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from trainer.attention.packed import NAME, sequence_arguments
from trainer.attention.padded import padded_attention
from trainer.attention.varlen import HAS_KERNEL, kernel_takes, varlen_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
LENGTHS = [700, 512, 129, 40, 1]
WIDTH = 64
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


def states(lengths: list[int], dtype: torch.dtype, heads: int = 8, groups: int = 4) -> list[Tensor]:
    """query [T, H, D], key and value [T, N, D]"""
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(sum(lengths), count, WIDTH, generator=generator, device="cuda").to(dtype).requires_grad_()
        for count in (heads, heads // groups, heads // groups)
    ]


def with_gradients(attention: Attention, inputs: list[Tensor]) -> list[Tensor]:
    output = attention(inputs[0], inputs[1], inputs[2])
    weights = torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output).to(output.dtype)
    return [output, *torch.autograd.grad(output, inputs, weights)]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Of the output and of each gradient: norm of the difference over the norm."""
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("window", [None, 100])
def test_it_is_as_exact_as_sdpa_on_each_sequence(window: int | None, groups: int) -> None:
    """Both in bfloat16, against float64 of the same numbers."""
    assert HAS_KERNEL
    inputs, cu_seqlens = states(LENGTHS, torch.bfloat16, groups=groups), bounds(LENGTHS)
    assert kernel_takes(inputs[0], inputs[2], 768)
    assert kernel_takes(inputs[0], inputs[2], 4096, window=100)

    def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return varlen_attention(query, key, value, cu_seqlens, 768, scale=0.2, window=window)

    def padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return padded_attention(query, key, value, cu_seqlens, scale=0.2, window=window)

    exact = with_gradients(padded, [state.detach().double().requires_grad_() for state in inputs])
    for found, bound in zip(
        errors(with_gradients(packed, inputs), exact), errors(with_gradients(padded, inputs), exact), strict=True
    ):
        assert found < max(2 * bound, 0.01)


def test_float32_on_the_card_is_exact_too() -> None:
    inputs, cu_seqlens = states(LENGTHS, torch.float32), bounds(LENGTHS)

    def padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return padded_attention(query, key, value, cu_seqlens, scale=0.2, window=None)

    exact = with_gradients(padded, [state.detach().double().requires_grad_() for state in inputs])
    assert not kernel_takes(inputs[0], inputs[2], 768)
    assert max(errors(with_gradients(padded, inputs), exact)) < 1e-4


def test_it_needs_no_memory_that_grows_with_the_square_of_tokens() -> None:
    lengths = [4096] * 16
    inputs, cu_seqlens = states(lengths, torch.bfloat16), bounds(lengths)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with_gradients(lambda q, k, v: varlen_attention(q, k, v, cu_seqlens, 4096, scale=None, window=None), inputs)
    assert torch.cuda.max_memory_allocated() - before < sum(lengths) ** 2 / 4  # a mask takes one byte for each pair


def model(implementation: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH,
        max_position_embeddings=8192,
    )
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return made.to("cuda", dtype)


def tokens(lengths: list[int]) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(512, (1, sum(lengths)), generator=generator, device="cuda")
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to("cuda")}


def packed_logits(packed: PreTrainedModel, lengths: list[int]) -> Tensor:
    arguments = sequence_arguments(bounds(lengths), max(lengths), attn_implementation=NAME)
    logits: Tensor = packed(**tokens(lengths), **arguments).logits
    return logits


def test_a_model_sees_each_sequence_alone() -> None:
    """bfloat16 packed and bfloat16 alone are equally far from float32 alone."""
    parts = torch.split(tokens(LENGTHS)["input_ids"], LENGTHS, 1)

    def alone(one: PreTrainedModel) -> Tensor:
        return torch.cat([one(input_ids=part, use_cache=False).logits for part in parts], 1)

    with torch.no_grad():
        exact = alone(model("sdpa", torch.float32)).double()
        bound = errors([alone(model("sdpa", torch.bfloat16))], [exact])[0]
        found = errors([packed_logits(model(NAME, torch.bfloat16), LENGTHS)], [exact])[0]
    assert found < 1.5 * bound


@pytest.fixture
def no_waiting() -> Iterator[Callable[[str], None]]:
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


def test_the_host_never_waits_for_the_device(no_waiting: Callable[[str], None]) -> None:
    packed, given = model(NAME, torch.bfloat16), tokens(LENGTHS)
    arguments = sequence_arguments(bounds(LENGTHS), max(LENGTHS), attn_implementation=NAME)
    torch.autograd.backward(packed(**given, **arguments).logits.sum())
    no_waiting("error")
    torch.autograd.backward(packed(**given, **arguments).logits.sum())


def test_a_compiled_layer_is_one_graph_for_all_lengths() -> None:
    plain, compiled = model(NAME, torch.bfloat16), model(NAME, torch.bfloat16)
    body = compiled.model
    assert isinstance(body, nn.Module) and isinstance(body.layers, nn.ModuleList)
    for layer in body.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    for lengths in ([300, 200], [129, 64, 40], [700, 512, 129, 40, 1]):
        logits = packed_logits(compiled, lengths)
        torch.testing.assert_close(logits, packed_logits(plain, lengths), rtol=0.05, atol=0.05)
        torch.autograd.backward(logits.float().square().mean())
        assert all(weight.grad is not None for weight in compiled.parameters())
