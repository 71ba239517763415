"""Small models made from a seed: real Hugging Face folders of Qwen3 architecture, for the demo, the tests and CI.

`demo` does two-digit arithmetic with one token per character; `gsm8k` reads any text, one token per byte.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.small.char_tokenizer import byte_tokenizer, char_tokenizer

Preset = Literal["demo", "gsm8k"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """Sizes of a Qwen3 model. Units: features, layers, heads, tokens."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    max_positions: int
    initializer_range: float


SHAPES: dict[Preset, TinyShape] = {
    "demo": TinyShape(
        hidden_size=128,
        intermediate_size=664,
        num_layers=2,
        num_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_positions=256,
        initializer_range=0.05,
    ),
    "gsm8k": TinyShape(
        hidden_size=128,
        intermediate_size=384,
        num_layers=2,
        num_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_positions=4096,
        initializer_range=0.02,
    ),
}


def make_tiny_qwen3(
    folder: Path | str, *, preset: Preset = "demo", seed: int = 0, shape: TinyShape | None = None
) -> Path:
    """Write a random float32 Qwen3 model with its tokenizer to `folder`; the same seed gives the same weights.

    `shape` overrides the preset's sizes and keeps its tokenizer. Raises ValueError for an unknown preset.
    """
    if preset not in SHAPES:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(SHAPES)}")
    tokenizer = char_tokenizer() if preset == "demo" else byte_tokenizer()
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    model = _build(shape or SHAPES[preset], tokenizer=tokenizer, seed=seed)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def _build(shape: TinyShape, *, tokenizer: Any, seed: int) -> Any:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model
