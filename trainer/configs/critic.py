"""The trainer's settings of a critic: `trainer.critic`. Imports pydantic and settings only."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from trainer.configs.section import Section, one_of
from trainer.configs.update import AGGREGATIONS, OptimizerConfig


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic and its schedule, which counts the critic's own training steps."""

    lr: float = Field(default=1e-5, gt=0, description="peak learning rate")


class CriticConfig(Section):
    """The value model of PPO: a transformer body and a linear head, with weights of its own beside the policy's."""

    model: str | None = Field(
        default=None,
        min_length=1,
        description="folder or Hugging Face id that the body comes from, with the policy's vocabulary; null: the start"
        " model",
    )
    head_init: float = Field(
        default=0.0,
        ge=0,
        description="standard deviation of the head's weights at the start; 0: all values are 0 at first",
    )
    bound: float | None = Field(
        default=None,
        gt=0,
        description="values are bound * tanh(raw / bound), which is raw itself around 0; null: not bounded",
    )
    optimizer: CriticOptimizerConfig = Field(
        default_factory=CriticOptimizerConfig, description="AdamW and its schedule, apart from the policy's"
    )
    cliprange_value: float = Field(
        default=0.5, gt=0, description="value loss: values count as clipped to so far around those before the updates"
    )
    vf_coef: float = Field(default=1.0, gt=0, description="factor of the value loss before backward")
    loss_aggregation: Annotated[str, AfterValidator(one_of("loss aggregation", AGGREGATIONS))] = Field(
        default="token-mean",
        description="how per-token value losses become one number",
    )
    loss_scale_factor: float | None = Field(
        default=None,
        gt=0,
        description="divisor of seq-mean-token-sum-norm, in tokens; null: widest response of the batch",
    )
    epochs: int | None = Field(default=None, ge=1, description="passes over each batch; null: as the policy's")
    minibatches: int | None = Field(
        default=None, ge=1, description="optimizer updates per pass over the batch; null: as the policy's"
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="training steps at the start in which the critic is trained and the policy is not"
    )
    offload: Literal["none", "optimizer", "all"] | None = Field(
        default=None,
        description="what lies in host memory while the critic does not compute: its moments (optimizer), also its"
        " weights (all); null: as trainer.offload",
    )

    @model_validator(mode="after")
    def _loss_is_whole(self) -> Self:
        if self.loss_scale_factor is not None and self.loss_aggregation != "seq-mean-token-sum-norm":
            raise ValueError("loss_scale_factor needs loss_aggregation='seq-mean-token-sum-norm'")
        return self
