"""Evaluation during training: when, on what, and how much of the rollout servers it may take. Pydantic only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import Field, model_validator

from rollout.datasets.arithmetic import ENUMERABLE, Split, num_problems
from rollout.datasets.config import DataConfig
from services.configs.launch import Section


class EvaluationConfig(Section):
    """Evaluation beside training: held-out prompts go to the same rollout servers, and training does not wait."""

    every_steps: int = Field(
        default=0, ge=0, description="a version is evaluated after every so many steps; 0: no evaluation at all"
    )
    at_start: bool = Field(default=False, description="the start model, version 0, is evaluated, too")
    at_end: bool = Field(default=True, description="the last version is evaluated, whatever every_steps says")
    data: DataConfig | None = Field(default=None, description="where the prompts come from; null: the section data")
    split: Split = Field(default="test", description="which split of it")
    num_prompts: int = Field(default=64, ge=0, description="the first so many prompts of the split; 0: all")
    samples_per_prompt: int = Field(default=1, ge=1, le=65535, description="samples drawn for each prompt")
    k: tuple[int, ...] = Field(
        default=(1,), description="pass@k and maj@k are told for each of these, at most samples_per_prompt"
    )
    temperature: float = Field(default=0.0, ge=0, description="of these samples; 0 takes the most likely token")
    max_tokens: int | None = Field(
        default=None, ge=1, description="response tokens at most; null: rollout.sampling.max_tokens"
    )
    threshold: float = Field(default=1.0, description="reward from which on a response counts as correct")
    share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="of the samples that a rollout server takes at once (twice max_num_seqs), at most so many are of an"
        " evaluation while the run trains; room for one group always stays. After the last step: all",
    )
    deadline_seconds: float = Field(
        default=300.0, gt=0, description="how long the run waits, when all is trained, for the last evaluation"
    )

    @model_validator(mode="after")
    def _samples_suffice(self) -> Self:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"samples_per_prompt={self.samples_per_prompt} at temperature=0 draws one sample again and again:"
                " set temperature"
            )
        wrong = [k for k in self.k if not 1 <= k <= self.samples_per_prompt]
        if wrong:
            raise ValueError(f"k={wrong[0]} is not between 1 and samples_per_prompt={self.samples_per_prompt}")
        return self

    def prompts_of(self, data: DataConfig) -> DataConfig:
        """The source of the prompts, in a run on `data`."""
        return split_of(self.data or data, self.split, num_prompts=self.num_prompts)

    def problems(self, *, data: DataConfig, group_size: int, num_at_once: int) -> Iterator[str]:
        """Why it cannot be in a run on `data` whose largest server takes `num_at_once` samples."""
        if not self.every_steps:
            return
        if self.data is None and data.type in ("file", "random"):
            yield (
                f"evaluation.every_steps={self.every_steps} with data.type={data.type}, which has no split apart from"
                " what is trained on: say evaluation.data"
            )
        if group_size >= num_at_once:
            yield (
                f"evaluation.every_steps={self.every_steps}: a group fills the {num_at_once} samples that a rollout"
                " server takes at once (twice max_num_seqs), no evaluation would fit beside it"
            )


def split_of(data: DataConfig, split: Split, *, num_prompts: int) -> DataConfig:
    """The first prompts of a split, 0: all. How many problems are made for one split is no bound for the other."""
    changes: dict[str, object] = {"split": split, "limit": num_prompts or None}
    if data.type == "arithmetic" and split != data.split:
        countable = num_problems(digits=data.digits, operators=data.operators) <= ENUMERABLE
        changes["size"] = None if countable else num_prompts or data.size
    return data.model_copy(update=changes)
