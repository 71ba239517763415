"""Factories for the engine tests: tiny random models, a character tokenizer, a plain forward pass to compare with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CHARACTERS = "0123456789+-*= abcdefgh"
VOCAB_SIZE = 32
CONFIGS: dict[str, type] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}

torch.set_num_threads(1)


@pytest.fixture
def build_model() -> Callable[..., Any]:
    """build_model(kind, seed=...): a random model, sharp enough that its tokens differ in probability."""

    def build(kind: str = "qwen3", *, seed: int = 0, **changes: Any) -> Any:
        torch.manual_seed(seed)
        settings: dict[str, Any] = dict(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            bos_token_id=2,
            eos_token_id=1,
            pad_token_id=0,
        )
        return AutoModelForCausalLM.from_config(CONFIGS[kind](**(settings | changes))).eval()

    return build


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One character, one token; ids 0, 1, 2 are padding, end and begin of sequence."""
    vocab = {token: at for at, token in enumerate(["<pad>", "<eos>", "<bos>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>")


@pytest.fixture
def plain_logits() -> Callable[..., Tensor]:
    """plain_logits(model, prompt, response): logits before each response token, (n, V), by one forward pass."""

    def run(model: Any, prompt: Any, response: Any) -> Tensor:
        ids = torch.tensor([[*map(int, prompt), *map(int, response)]])
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits

    return run
