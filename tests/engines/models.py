"""Small random Qwen3 models on disk, and what transformers and the trainer say about their tokens."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config, Qwen3ForCausalLM

from trainer.reference import ReferencePolicy
from trainer.small.char_tokenizer import char_tokenizer

MAX_MODEL_LEN = 768


def write_model(folder: Path, *, tied: bool) -> Path:
    """A float32 model with its tokenizer, sharp enough that its tokens differ in probability."""
    tokenizer = char_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def read_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def changed(model_folder: Path, *, seed: int) -> Any:
    """The model with every parameter moved, so that its tokens and logprobs are others."""
    model = read_model(model_folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def greedy_tokens(model: Any, prompt: Iterable[int], *, count: int) -> list[int]:
    """What transformers' own generate takes as the most likely tokens, end tokens among them."""
    prompt = list(prompt)
    ids = torch.tensor([prompt])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=None
    )
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens


def trainer_logprobs(
    model: Any, prompt: Iterable[int], response: Iterable[int], *, temperature: float = 1.0
) -> np.ndarray[Any, Any]:
    """Of each token of the response, by the trainer's own policy."""
    policy = ReferencePolicy(model, MAX_MODEL_LEN, temperature=temperature)
    tokens = (np.array(list(map(int, ids)), np.int32) for ids in (prompt, response))
    return policy.logprobs(*([ids] for ids in tokens))[0]


@torch.no_grad()
def filtered_logprobs(
    model: Any, prompt: Iterable[int], response: Iterable[int], *, temperature: float, top_k: int, top_p: float
) -> np.ndarray[Any, Any]:
    """Of each token of the response, where only the most likely tokens may be drawn: top_k first, then top_p."""
    prompt, response = list(map(int, prompt)), list(map(int, response))
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    found = []
    for row, token in zip((logits / temperature).softmax(-1), response, strict=True):
        order = row.argsort(descending=True)[: top_k if top_k > 0 else None]
        probabilities = row[order] / row[order].sum()
        count = int((probabilities.cumsum(0) - probabilities < top_p).sum())
        kept = dict(
            zip(order[:count].tolist(), (probabilities[:count] / probabilities[:count].sum()).log(), strict=True)
        )
        assert token in kept, "a token was drawn that had been cut away"
        found.append(kept[token])
    return torch.stack(found).numpy()


@torch.no_grad()
def logprobs_after_keep(
    old: Any, new: Any, prompt: Iterable[int], response: Iterable[int], *, before: int
) -> np.ndarray[Any, Any]:
    """Of each token, where `new` goes on after `before` tokens with the keys and values that `old` has computed."""
    cache = DynamicCache()
    tokens = torch.tensor([list(map(int, response))])
    read_by_old = torch.cat([torch.tensor([list(prompt)]), tokens[:, : before - 1]], dim=1)
    early: Tensor = old(input_ids=read_by_old, past_key_values=cache, use_cache=True).logits[0, -before:]
    late: Tensor = new(input_ids=tokens[:, before - 1 : -1], past_key_values=cache, use_cache=True).logits[0]
    logprobs = torch.cat([early, late]).log_softmax(-1)
    return logprobs.gather(1, tokens[0][:, None])[:, 0].numpy()
