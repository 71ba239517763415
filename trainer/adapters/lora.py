"""LoRA by PEFT: adapters put into a causal language model in place, so that only they take a gradient.

A target `model.layers.0.mlp.up_proj` becomes PEFT's layer with `base_layer.weight`, `lora_A.default.weight` and
`lora_B.default.weight` below that name. B starts at 0, so version 0 is the base model.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protos.lowrank import fingerprints
from trainer.adapters.merging import LowRank, Weight, whole
from trainer.configs.lora import LoraConfig

ADAPTER = "default"
"""PEFT's name of the one adapter."""
BASE = ".base_layer."


def attach_adapter(model: nn.Module, config: LoraConfig, *, base_model: str = "") -> nn.Module:
    """Put an adapter into `model` and freeze all else; leaves the global seeds alone. Gives `model` back.

    It then has a `fingerprint_of_base`. base_model: what adapter_config.json will name. ValueError where a target does
    not exist, or PEFT is missing.
    """
    try:
        from peft import LoraConfig as PeftLora
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ValueError("trainer.lora needs PEFT: pip install 'offbeat[train]'") from error
    settings = PeftLora(
        r=config.rank,
        lora_alpha=int(config.alpha) if config.alpha.is_integer() else config.alpha,
        use_rslora=config.rslora,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(target_names(model, config)),
        task_type="CAUSAL_LM",
        base_model_name_or_path=located(base_model),
    )
    model.requires_grad_(False)
    model.__dict__["fingerprint_of_base"] = base_fingerprint(model)  # before it is sharded
    with torch.random.fork_rng(devices=[]):  # PEFT draws A on the CPU, whatever the device
        torch.manual_seed(config.seed)
        inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, config.dtype))
    return model


def located(model: str) -> str:
    """A folder's absolute path; a hub id as it is."""
    return str(Path(model).resolve()) if model and Path(model).exists() else model


def target_names(model: nn.Module, config: LoraConfig) -> set[str]:
    """Full names of the layers that get an adapter; ValueError, with the nearest existing name, for one that fits none.

    The output head has none: the trainer scores with its plain weight, and it may be the embedding.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear = {name for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head}
    if not linear:
        raise ValueError(f"trainer.lora: {type(model).__name__} has no linear layers")
    if config.target_modules == "all-linear":
        return linear
    found: set[str] = set()
    for target in config.target_modules:
        fitting = {name for name in linear if name == target or name.endswith(f".{target}")}
        if not fitting:
            raise ValueError(_unknown(target, linear))
        found |= fitting
    return found


def _unknown(target: str, linear: set[str]) -> str:
    known = sorted({name.rpartition(".")[2] for name in linear})
    nearest = difflib.get_close_matches(target, known, n=1) or difflib.get_close_matches(target, linear, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"trainer.lora.target_modules: no linear layer is named {target!r}; {hint}existing: {', '.join(known)}"


def low_rank_weights(model: nn.Module) -> dict[str, LowRank]:
    """The weights with an adapter, by their names in the plain model; empty where there is no adapter."""
    return {f"{name}.weight": _low_rank(layer) for name, layer in _adapted(model)}


def pushed_weights(model: nn.Module) -> dict[str, Weight]:
    """Every weight by its name in the plain model, in that model's order: adapted ones as sums."""
    sums = low_rank_weights(model)
    named = ((plain_name(name), one) for name, one in model.named_parameters() if not is_adapter(name))
    return {name: sums.get(name, one) for name, one in named}


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """A and B of every adapter, by PEFT's names in a model without its wrapper: `...q_proj.lora_A.weight`."""
    named = model.named_parameters()
    return {name.replace(f".{ADAPTER}.", "."): one for name, one in named if is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Of a parameter of the model with an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """The name that a frozen parameter has in the model without an adapter."""
    return name.replace(BASE, ".")


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base: the reference policy of a LoRA run.

    By a scaling of 0: PEFT's own switch would change what takes a gradient, which FSDP reads only once.
    """
    layers = [layer for _, layer in _adapted(model)]
    before = [layer.scaling[ADAPTER] for layer in layers]
    try:
        for layer in layers:
            layer.scaling[ADAPTER] = 0.0
        yield
    finally:
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling[ADAPTER] = scaling


def base_fingerprint(model: nn.Module) -> str:
    """sha256 over names, dtypes and checksums of the frozen parameters; with shards a collective."""
    named = {plain_name(name): one for name, one in model.named_parameters() if not is_adapter(name)}
    sums = fingerprints(whole(one) for one in named.values())
    lines = [f"{name} {one.dtype} {found}" for (name, one), found in zip(named.items(), sums, strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers by the names of what they stand for."""
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and ADAPTER in getattr(module, "lora_A", ()):
            yield name, module


def _low_rank(layer: Any) -> LowRank:
    return LowRank(
        base=layer.base_layer.weight,
        a=layer.lora_A[ADAPTER].weight,
        b=layer.lora_B[ADAPTER].weight,
        scaling=float(layer.scaling[ADAPTER]),
    )
