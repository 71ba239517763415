"""What the server's own process knows of a model whose weights lie in SGLang's: names, shapes, ends, tokenizer."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from protos import Manifest
from protos.buckets import weights_of
from protos.tensors import TORCH_DTYPES
from rollout.engines.checkpoint import chosen_length, end_ids_of, read_generation_config
from rollout.engines.hf_weights import Weights

Parameter = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outline:
    """A model without its weights. `known`: by each of its names, also where it is tied; `listed`: tied ones once."""

    max_model_len: int
    vocab_size: int
    end_ids: frozenset[int]
    tokenizer: Any | None
    listed: list[Parameter]
    known: dict[str, Parameter]

    def misfits(self, manifest: Manifest) -> list[str]:
        """What in a push does not fit the model, in words."""
        found = []
        for spec in weights_of(manifest):
            given = (spec.name, str(TORCH_DTYPES[spec.dtype]).removeprefix("torch."), tuple(spec.shape))
            own = self.known.get(spec.name)
            if own is None:
                found.append(f"the model has no parameter {spec.name}")
            elif own[1:] != given[1:]:
                found.append(f"{spec.name} comes as {given[1]} {given[2]}, not {own[1]} {own[2]}")
        return found


def read_outline(path: str, *, dtype: str, max_model_len: int | None) -> Outline:
    """Read configuration and tokenizer of a folder or of the hub. ValueError where the asked length does not fit."""
    config = AutoConfig.from_pretrained(path)
    wanted = getattr(torch, dtype) if dtype != "auto" else (getattr(config, "dtype", None) or torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=wanted)
    listed = Weights(model).describe()
    by_id = {id(one): row for one, row in zip(model.parameters(), listed, strict=True)}
    tokenizer = read_tokenizer(path)
    return Outline(
        max_model_len=chosen_length(getattr(config, "max_position_embeddings", None), asked=max_model_len),
        vocab_size=model.get_input_embeddings().num_embeddings,
        end_ids=end_ids_of([config, read_generation_config(path), tokenizer]),
        tokenizer=tokenizer,
        listed=listed,
        known={name: by_id[id(one)] for name, one in model.named_parameters(remove_duplicate=False)},
    )


def read_tokenizer(path: str) -> Any | None:
    """None where there is none: then there is no text, and there are no stop strings."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        return None
