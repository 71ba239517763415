"""Models of real sizes with random weights, made on the spot for benches: the shapes of Qwen3, nothing downloaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.small.word_tokenizer import word_tokenizer

INITIALIZER_RANGE = 0.02
DTYPES = ("bfloat16", "float32", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3 model. Units: features, layers, heads, tokens. The embedding is the output layer too (tied)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 151_936
    max_positions: int = 40_960


SHAPES = {
    "qwen3-0.6b": Shape(hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_key_value_heads=8),
    "qwen3-1.7b": Shape(hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16, num_key_value_heads=8),
    "qwen3-4b": Shape(hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, num_key_value_heads=8),
    "tiny": Shape(
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=512,
        max_positions=4096,
    ),
}


def make_shape(name: str, folder: Path | str, *, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write a model of this shape with its tokenizer to `folder`; normal weights of deviation 0.02, on the GPU if any.

    The folder appears whole or not at all; one that holds a model stays as it is. ValueError for an unknown shape or
    dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; there are {', '.join(DTYPES)}")
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; there are {', '.join(SHAPES)}")
    target = Path(folder)
    if (target / "config.json").is_file():
        return target
    scratch = target.with_name(f"{target.name}.tmp")
    scratch.mkdir(parents=True, exist_ok=True)
    tokenizer = word_tokenizer(SHAPES[name].vocab_size)
    _build(SHAPES[name], tokenizer, dtype=dtype, seed=seed).save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    scratch.rename(target)
    return target


def _build(shape: Shape, tokenizer: Any, *, dtype: str, seed: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(_config(shape, tokenizer, dtype), dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def _config(shape: Shape, tokenizer: Any, dtype: str) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        initializer_range=INITIALIZER_RANGE,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
    )
