"""The trainer's settings of LoRA: `trainer.lora`. Imports pydantic and settings only."""

import math
from typing import Literal

from pydantic import Field, field_validator

from trainer.configs.section import Section


class LoraConfig(Section):
    """Low-rank adapters beside frozen weights, by PEFT: W + scaling * B @ A, of which A and B are trained."""

    rank: int = Field(default=16, ge=1, description="rows of A and columns of B")
    alpha: float = Field(default=32.0, gt=0, description="B @ A is multiplied by alpha / rank")
    rslora: bool = Field(default=False, description="multiply by alpha / sqrt(rank) instead (rank-stabilized LoRA)")
    dropout: float = Field(default=0.0, description="0 only: the trained policy must be the one that sampled")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        default="all-linear",
        description="linear layers that get an adapter, by the end of their names, e.g. [q_proj, v_proj]; all-linear:"
        " every one but the output head, which never has one",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of A's random start; B starts at 0")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of A, B and their moments; float32 also beside bfloat16 weights: they are few, and bfloat16"
        " would round small updates away",
    )
    push: Literal["merged", "adapter"] = Field(
        default="merged",
        description="merged: whole weights travel. adapter: A and B travel, and the rollout servers add them to their"
        " own start model, of which they keep the changed layers twice more in the device's memory (vllm without a"
        " GPU, or with a quantized model, all other weights once more, too)",
    )

    @field_validator("dropout")
    @classmethod
    def _without_dropout(cls, value: float) -> float:
        if value != 0:
            raise ValueError(f"{value} would train another policy than the one that sampled: set 0")
        return value

    @field_validator("target_modules")
    @classmethod
    def _some_targets(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("names no layer: list some, or say all-linear")
        return value

    @property
    def scaling(self) -> float:
        """Factor of B @ A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
