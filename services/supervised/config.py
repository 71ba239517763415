"""The config of supervised training (`offbeat sft`): sections of a run, and one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from rollout.datasets.config import DataConfig
from services.config import NAME_PATTERN
from services.configs.evaluation import split_of
from services.configs.launch import Section
from services.configs.models import TinyConfig
from trainer.config import AlgorithmConfig, TrainerConfig


class SftRunConfig(Section):
    """What the run is."""

    name: str = Field(pattern=NAME_PATTERN, description="name of the run; its folder is <folder>/<name>")
    folder: str = Field(default="outputs", description="where run folders are made")


class SftSection(Section):
    """How long, in which batches, and what is held out."""

    num_steps: int | None = Field(default=None, ge=1, description="optimizer updates of the run; null: by epochs")
    epochs: int | None = Field(default=None, ge=1, description="passes over the rows, rounded up to whole batches")
    batch_size: int = Field(default=64, ge=1, description="rows of an update, over all ranks")
    max_length: int = Field(
        default=2048, ge=2, description="prompt and response tokens; longer rows are counted and left out, never cut"
    )
    evaluate_every: int = Field(
        default=0, ge=0, description="steps between two looks at held-out rows, and one at the end; 0: none at all"
    )
    held_out: DataConfig | None = Field(
        default=None, description="where held-out rows come from; null: held_out_share, or the other split of the data"
    )
    held_out_share: float = Field(
        default=0.0, ge=0, lt=1, description="share of the data's own rows that is held out instead, drawn by its seed"
    )
    num_held_out: int = Field(default=512, ge=0, description="at most so many held-out rows are looked at; 0: all")
    log_every: int = Field(default=10, ge=1, description="steps between two log lines")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.num_steps is None) == (self.epochs is None):
            raise ValueError("say either num_steps or epochs")
        if self.held_out is not None and self.held_out_share:
            raise ValueError("held_out and held_out_share both hold rows out: say one")
        return self

    def steps(self, num_rows: int) -> int:
        """Updates of the whole run."""
        return self.num_steps or -(-(self.epochs or 1) * num_rows // self.batch_size)


class SftLaunch(Section):
    """What `offbeat sft` starts on this box."""

    trainer_ranks: int = Field(
        default=1, ge=1, description="processes (torchrun) that share the model by FSDP2, each with a GPU of its own"
    )


class SftConfig(Section):
    """A supervised run."""

    model: str | None = Field(default=None, description="folder or hub id of the start model")
    tiny: TinyConfig | None = Field(default=None, description="make the start model on the spot")
    run: SftRunConfig
    data: DataConfig
    sft: SftSection
    trainer: TrainerConfig
    launch: SftLaunch = Field(default_factory=SftLaunch)

    @property
    def run_folder(self) -> Path:
        return Path(self.run.folder).expanduser() / self.run.name

    def held_out_data(self) -> DataConfig | None:
        """The source of held-out rows, where they are not a share of the data's own."""
        if not self.sft.evaluate_every or self.sft.held_out_share:
            return None
        if self.sft.held_out is not None:
            return self.sft.held_out
        return split_of(self.data, "test", num_prompts=self.sft.num_held_out)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        own = self.data.type in ("arithmetic", "gsm8k") and self.data.split == "train"
        if self.sft.evaluate_every and self.sft.held_out is None and not self.sft.held_out_share and not own:
            yield (
                f"sft.evaluate_every={self.sft.evaluate_every}: data.type={self.data.type} has no other split to hold"
                " out, say sft.held_out or sft.held_out_share"
            )
        if "random" in (self.data.type, self.sft.held_out and self.sft.held_out.type):
            yield "data.type=random has prompts only, and supervised training needs responses"
        if self.tiny is not None and self.tiny.warm_start_steps:
            yield "tiny.warm_start_steps is a supervised start of its own: leave it out"
        if self.trainer.algorithm != AlgorithmConfig():
            yield "trainer.algorithm is that of reinforcement learning, of which nothing is used here: leave it out"
        for name in ("kl_above", "entropy_below", "logprob_diff_above"):
            if getattr(self.trainer.guards, name) is not None:
                yield f"trainer.guards.{name} looks at a figure that supervised training does not have: leave it out"
        if self.trainer.critic is not None:
            yield "trainer.critic has nothing to judge in supervised training: leave it out"
