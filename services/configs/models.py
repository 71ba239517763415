"""Models that a run makes on the spot, and the frozen one beside it. Imports pydantic only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from services.configs.launch import Section


class TinyConfig(Section):
    """A model made on the spot, where no model folder is given."""

    preset: Literal["demo", "gsm8k", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"] = Field(
        default="demo",
        description="size and tokenizer; qwen3: a real size, random weights in trainer.dtype, for benches",
    )
    seed: int = Field(default=0, ge=0, description="seed of the weights and of the warm start")
    warm_start_steps: int = Field(
        default=0, ge=0, description="supervised steps on the run's own data, at most; 0: none"
    )
    warm_start_accuracy: float = Field(
        default=0.36, gt=0, le=1, description="held-out greedy accuracy at which the warm start ends before that"
    )

    @model_validator(mode="after")
    def _warm_start_fits(self) -> Self:
        if self.warm_start_steps and self.preset.startswith("qwen3"):
            raise ValueError(f"preset {self.preset} is for benches and has no warm start: set warm_start_steps=0")
        return self


class ReferenceConfig(Section):
    """The frozen policy."""

    enabled: bool = Field(
        default=False, description="ask for reference logprobs even where no KL is used (as a metric)"
    )
    model: str | None = Field(
        default=None, description="folder or hub id; null: the start model. The teacher of adv_estimator=distillation"
    )
    tiny: TinyConfig | None = Field(default=None, description="make that model on the spot")
    max_tokens_per_microbatch: int = Field(default=16384, ge=1, description="tokens, padding included, in one forward")
    threads: int = Field(default=1, ge=0, description="CPU threads; 0: as torch finds it")

    def teacher_problems(self, *, start_model: str, start: TinyConfig | None, dynamic_sampling: int) -> Iterator[str]:
        """Why this cannot be the teacher of a student that begins as `start_model`."""
        if self.model is None or Path(self.model).expanduser().resolve() == Path(start_model).expanduser().resolve():
            yield (
                "reference.model is the start model, and adv_estimator=distillation learns from what another model says"
                " to the student's tokens: set reference.model to the teacher"
            )
        if self.tiny is not None and start is not None and self.tiny.preset != start.preset:
            yield f"reference.tiny.preset={self.tiny.preset} has other tokens than tiny.preset={start.preset}"
        if dynamic_sampling:
            yield (
                "run.dynamic_sampling drops groups of equal reward, which adv_estimator=distillation learns from too:"
                " set it to 0"
            )
