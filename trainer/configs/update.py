"""Settings of an update: how losses of tokens become one number, and AdamW. Imports pydantic and settings only."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trainer.configs.section import Section

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule; a schedule step is one training step, however many updates it makes."""

    lr: float = Field(default=1e-6, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="decay of the first and second moments")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled weight decay, times lr, per update")
    warmup_steps: int = Field(default=0, ge=0, description="training steps of linear warm-up; the first has lr 0")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="shape after warm-up")
    total_steps: int | None = Field(default=None, ge=1, description="training steps until min_lr_ratio is reached")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="final learning rate as a share of lr")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="gradient 2-norm is clipped to this; null: not")

    @model_validator(mode="after")
    def _schedule_is_whole(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must lie in [0, 1)")
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule={self.schedule!r} needs total_steps")
        if self.schedule == "constant" and self.min_lr_ratio > 0:
            raise ValueError("min_lr_ratio does nothing with schedule='constant'")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps={self.total_steps} must exceed warmup_steps={self.warmup_steps}")
        return self
