"""Packed sequences against each sequence alone: tiny models of four families, every implementation that runs here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from trainer.attention.packed import NAME, check_packable, packed_attention, sequence_arguments
from trainer.attention.padded import MAX_PADDED_WORK, layout_of
from trainer.model.load import load_model
from trainer.small.tiny import make_tiny_qwen3

LENGTHS = [70, 23, 9, 1]
WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
}


def build(name: str, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation=implementation)
    return model


def sequences(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(50, (1, length), generator=generator) for length in lengths]


def bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def packed_logits(model: PreTrainedModel, parts: Sequence[Tensor], **others: Any) -> Tensor:
    lengths = [part.shape[1] for part in parts]
    arguments = sequence_arguments(
        bounds(lengths), max(lengths), attn_implementation=str(model.config._attn_implementation)
    )
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    logits: Tensor = model(input_ids=torch.cat(list(parts), 1), position_ids=position_ids, **arguments | others).logits
    return logits


def lone_logits(model: PreTrainedModel, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1)


def gradients(model: nn.Module, logits: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return list(torch.autograd.grad((logits.log_softmax(-1) * weights).mean(), list(model.parameters())))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", ["packed", "sdpa", "eager"])
def test_packed_is_each_sequence_alone(name: str, implementation: str) -> None:
    model, alone = build(name, implementation), build(name, "eager")
    logits, expected = packed_logits(model, sequences()), lone_logits(alone, sequences())
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(model, logits), gradients(alone, expected), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without torch.compile")
def test_flex_attention_keeps_sequences_apart() -> None:
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = packed_logits(build("gemma3", "flex_attention"), sequences())
        torch.testing.assert_close(logits, lone_logits(build("gemma3", "eager"), sequences()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_recomputed_layers_see_the_same_sequences(name: str) -> None:
    model, stored = build(name, NAME), build(name, NAME)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(model.train(), packed_logits(model, sequences()))
    expected = gradients(stored, packed_logits(stored, sequences()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_order_of_sequences_and_company_do_not_matter() -> None:
    model, parts = build("gemma3", NAME), sequences()
    whole = torch.split(packed_logits(model, parts), LENGTHS, 1)
    turned = torch.split(packed_logits(model, parts[::-1]), LENGTHS[::-1], 1)
    for one, other in zip(whole, turned[::-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_wrong_bound_is_seen() -> None:
    model, parts = build("qwen3", NAME), sequences((9, 9))
    wrong = packed_logits(model, parts, cu_seq_lens_q=bounds((18,)))
    assert (wrong - lone_logits(model, parts)).abs()[0, 9:].amax(-1).min() > 1e-3


def test_same_input_gives_the_same_bits() -> None:
    model = build("mistral", NAME)
    assert torch.equal(packed_logits(model, sequences()), packed_logits(model, sequences()))


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
def test_attention_and_its_gradients_are_exact(window: int | None) -> None:
    """float64, against scores, band and softmax written out; values are wider than queries."""
    lengths = [40, 3, 1, 300, 290]
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, sum(lengths), width, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads, width in ((4, 8), (2, 8), (2, 16))
    ]
    options = {"scaling": 0.3, "sliding_window": window, "cu_seq_lens_q": bounds(lengths), "max_length_q": 300}
    found, _ = packed_attention(nn.Module(), states[0], states[1], states[2], None, **options)
    parts = [torch.split(state, lengths, 2) for state in states]
    expected = torch.cat([written_out(q, k, v, window) for q, k, v in zip(*parts, strict=True)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(
        torch.autograd.grad((found * weights).sum(), states),
        torch.autograd.grad((expected * weights).sum(), states),
        rtol=1e-10,
        atol=1e-10,
    )


def written_out(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    length = query.shape[2]
    seen = torch.ones(length, length).tril().triu(1 - (window or length)).bool()
    scores = query @ key.repeat_interleave(2, 1).mT * 0.3
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)


def test_blocks_hold_every_token_once_and_little_padding() -> None:
    lengths = [1000, 990, 700, 400, 399, 30, 20, 3, 1]
    layout = layout_of(bounds(lengths))
    assert torch.cat([block.flatten() for block in layout.blocks])[layout.places_T].equal(torch.arange(sum(lengths)))
    padded = sum(block.shape[0] * block.shape[1] ** 2 for block in layout.blocks)
    assert padded <= MAX_PADDED_WORK * sum(length**2 for length in lengths)
    assert len(layout.blocks) < len(lengths)


def test_layout_is_made_once_for_a_tensor() -> None:
    cu_seqlens = bounds((3, 2))
    assert layout_of(cu_seqlens) is layout_of(cu_seqlens)
    assert layout_of(cu_seqlens) is not layout_of(cu_seqlens.clone())


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_without_lengths_it_is_plain_attention(name: str) -> None:
    """One sequence longer than the window, a batch padded on the left, and decoding with a cache."""
    model, plain = build(name, NAME).eval(), build(name, "sdpa").eval()
    ids = torch.cat(sequences((20, 20)))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        found, expected = (one(input_ids=ids, attention_mask=mask).logits for one in (model, plain))
    assert torch.equal(found, expected)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_no_mask_is_built_where_the_caller_gives_none() -> None:
    model, seen = build("gemma3", NAME), list[int]()
    for module in model.modules():
        if type(module).__name__ == "Gemma3Attention":
            module.register_forward_pre_hook(
                lambda _, __, kwargs: seen.append(kwargs["attention_mask"].numel()), with_kwargs=True
            )
    with torch.no_grad():
        assert torch.equal(packed_logits(model, sequences(), attention_mask=None), packed_logits(model, sequences()))
    assert seen == [0, 0, 0, 0]


def test_lengths_that_do_not_arrive_are_told() -> None:
    position_ids = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(ValueError, match="Qwen3Attention without cu_seq_lens_q"):
        build("qwen3", NAME)(input_ids=torch.zeros_like(position_ids), position_ids=position_ids, use_cache=False)


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        (lambda: Gemma2Config(**SIZES, attn_logit_softcapping=30.0), "no softcap, which Gemma2Attention"),
        (lambda: GptOssConfig(**SIZES, num_local_experts=2), "no s_aux, which GptOssAttention"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(config: Callable[[], PreTrainedConfig], refusal: str) -> None:
    """Packed or not: nothing is left out of the scores in silence."""
    model = AutoModelForCausalLM.from_config(config(), attn_implementation=NAME)
    for run in (packed_logits, lone_logits):
        with pytest.raises(ValueError, match=rf"{refusal} needs: set trainer\.attn_implementation=eager"):
            run(model, sequences())


def test_several_rows_with_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="one row"):
        build("qwen3", NAME)(input_ids=torch.zeros(2, 5, dtype=torch.long), cu_seq_lens_q=bounds([5]), use_cache=False)


def test_a_model_that_mixes_sequences_is_refused_at_load() -> None:
    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ValueError, match="MambaForCausalLM has linear_attention layers"):
        check_packable(mamba)
    check_packable(build("gemma3", NAME))


def test_load_model_knows_it(tmp_path: Path) -> None:
    folder = str(make_tiny_qwen3(tmp_path / "tiny"))
    model = load_model(folder, dtype="float32", attn_implementation=NAME, device="cpu")
    assert isinstance(model, PreTrainedModel)
    torch.testing.assert_close(
        packed_logits(model, [part % 8 for part in sequences()]),
        lone_logits(model, [part % 8 for part in sequences()]),
        rtol=1e-5,
        atol=1e-5,
    )
