"""What a checkpoint says about its model, without loading a weight: parameters by Hugging Face names, end tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from protos import Manifest
from protos.buckets import weights_of
from protos.generated.trajectory_pb2 import DType
from rollout.engines.checkpoint import end_ids_of, read_generation_config


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """dtype: of the checkpoint, such as float32. shapes: of each parameter, tied ones once. end_ids: all end tokens."""

    dtype: str
    shapes: dict[str, tuple[int, ...]]
    end_ids: tuple[int, ...]
    tokenizer: Any

    def mistakes(self, manifest: Manifest, *, dtype: str, whole: bool) -> list[str]:
        """Why a version of this description cannot be taken. whole: every parameter must be in it."""
        specs = weights_of(manifest)
        found = [self._mistake(spec.name, tuple(spec.shape), spec.dtype, dtype) for spec in specs]
        complete = not whole or manifest.low_rank  # to an adapter the start model is added
        missing = () if complete else self.shapes.keys() - {spec.name for spec in specs}
        return [text for text in found if text] + [f"{name} is missing" for name in sorted(missing)]

    def _mistake(self, name: str, shape: tuple[int, ...], sent: "DType.ValueType", dtype: str) -> str:
        if name not in self.shapes:
            return f"the model has no parameter {name}"
        if shape != self.shapes[name]:
            return f"{name} has shape {shape}, not {self.shapes[name]}"
        if sent != DType.Value(f"DTYPE_{dtype.upper()}"):
            return f"{name} has dtype {DType.Name(sent).removeprefix('DTYPE_').lower()}, not {dtype}"
        return ""


def read_facts(path: str) -> ModelFacts:
    """Of a folder or a hub id; ValueError or OSError where there is no model."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tokenizer = AutoTokenizer.from_pretrained(path)
    return ModelFacts(
        dtype=str(config.dtype or torch.float32).removeprefix("torch."),
        shapes={name: tuple(one.shape) for name, one in model.named_parameters()},
        end_ids=tuple(sorted(end_ids_of([config, read_generation_config(path), tokenizer]))),
        tokenizer=tokenizer,
    )
