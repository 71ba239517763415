"""The reward room's config: which functions score, with what weight, and how far a worker may go."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, model_validator

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9._-]{0,127}$"


class FunctionConfig(BaseModel):
    """One reward function and its weight in the sum."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(
        min_length=1,
        max_length=4096,
        description="a built-in name, an entry point of group offbeat.rewards, or ./path/file.py:function "
        "(trusted code: it runs with the rights of the reward service)",
    )
    name: str | None = Field(
        default=None,
        pattern=NAME_PATTERN,
        description="name in the breakdown and in the route; null: the last part of the target",
    )
    weight: FiniteFloat = Field(default=1.0, description="factor of this value in the total; 0 only records it")
    parameters: dict[str, JsonValue] = Field(
        default_factory=dict, description="keyword arguments given to the function with every item"
    )

    @property
    def label(self) -> str:
        """The name under which values of this function are recorded."""
        return self.name or self.target.rpartition(":")[2]


class RewardConfig(BaseModel):
    """The reward functions of one service and the limits of the worker processes that run them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    functions: list[FunctionConfig] = Field(
        min_length=1, max_length=64, description="the functions whose weighted sum is the reward"
    )
    reward_clip: tuple[FiniteFloat, FiniteFloat] | None = Field(
        default=None, description="(lowest, highest) value of the weighted sum; null: as it is"
    )
    num_workers: int = Field(default=1, ge=1, le=1024, description="worker processes; each scores one item at a time")
    timeout_seconds: float = Field(
        default=5.0,
        gt=0,
        le=86400,
        description="seconds that all functions together may take for one sample; then its worker is killed",
    )
    start_timeout_seconds: float = Field(
        default=60.0, gt=0, le=86400, description="seconds a worker may take to load its functions and self-test them"
    )
    max_pending: int = Field(
        default=4096, ge=1, description="items that may wait for a worker; beyond it, callers wait"
    )
    max_restarts: int = Field(
        default=5, ge=0, description="failed starts in a row of one worker after which the whole scorer gives up"
    )
    restart_backoff_seconds: float = Field(
        default=0.1,
        ge=0,
        description="wait before a worker that died without finishing an item is replaced; doubles each time, to 5 s",
    )
    memory_limit_mb: int | None = Field(
        default=None, ge=128, description="MiB of address space of one worker (RLIMIT_AS); null: no limit"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        labels = [function.label for function in self.functions]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"functions named alike: {', '.join(twice)}; give each its own `name`")
        if self.reward_clip is not None and self.reward_clip[0] > self.reward_clip[1]:
            raise ValueError(f"reward_clip must be (lowest, highest), not {self.reward_clip}")
        return self
