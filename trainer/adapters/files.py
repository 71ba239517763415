"""The adapter of a checkpoint, as PEFT has it on disk: adapter_model.safetensors and adapter_config.json.

`AutoPeftModelForCausalLM`, `PeftModel.from_pretrained` and vLLM's LoRA read such a folder.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from protos.lowrank import add_low_rank
from trainer import durable
from trainer.adapters.lora import ADAPTER, adapter_weights, base_fingerprint
from trainer.checkpoints.whole import whole_tensors
from trainer.model.load import load_model, model_folder

ADAPTER_PART, ADAPTER_CONFIG = "adapter_model", "adapter_config.json"
PREFIX = "base_model.model."
"""That PEFT's wrapper puts before the names of the model."""


def saved_adapter(model: nn.Module) -> dict[str, Tensor]:
    """A and B by the names that PEFT's files have."""
    return {PREFIX + name: one for name, one in adapter_weights(model).items()}


def adapter_config(model: nn.Module) -> str:
    """The content of adapter_config.json."""
    settings = cast(Any, model).peft_config[ADAPTER].to_dict() | {"inference_mode": True}
    listed = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    return json.dumps(listed, indent=2, sort_keys=True)


@torch.no_grad()
def merged_model(checkpoint: Path) -> tuple[nn.Module, Path]:
    """The base of a LoRA checkpoint with the adapter added, in the dtype of the training, and the base's folder.

    The weights are those of a merged push. Raises ValueError where the base is not there any more, or has changed.
    """
    base = json.loads(durable.read_bytes(checkpoint / "state.json"))["base"]
    settings = json.loads(durable.read_bytes(checkpoint / ADAPTER_CONFIG))
    rank = settings["r"]
    scaling = settings["lora_alpha"] / (math.sqrt(rank) if settings["use_rslora"] else rank)
    model = load_model(base["model"], dtype=base["dtype"], attn_implementation="sdpa", device="cpu")
    if base_fingerprint(model) != base["fingerprint"]:
        raise ValueError(f"{base['model']} has changed since {checkpoint} was trained on it")
    factors = whole_tensors(checkpoint, ADAPTER_PART)
    for name in sorted(one.removesuffix(".lora_A.weight") for one in factors if one.endswith(".lora_A.weight")):
        weight = model.get_parameter(f"{name.removeprefix(PREFIX)}.weight")
        a, b = factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]
        add_low_rank(weight, weight, a, b, scaling=scaling)
    return model, model_folder(base["model"])
