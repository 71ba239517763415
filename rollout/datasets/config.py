"""Where the prompts come from: the data part of the run's config."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DataConfig(BaseModel):
    """One source of prompts. A mistake is a ValidationError before anything is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: Literal["arithmetic", "gsm8k", "file"] = "arithmetic"
    """arithmetic is made from the seed, gsm8k reads a folder, file reads parquet or JSONL files."""
    path: str | tuple[str, ...] = ()
    """file: one or more parquet, JSONL or JSON-lines files. gsm8k: the folder of {train,test}.parquet or .jsonl."""
    split: Literal["train", "test"] = "train"
    """arithmetic and gsm8k: which split. The test split shares no problem with the train split."""
    size: int | None = Field(default=None, ge=1)
    """arithmetic: number of problems; null is the whole split."""
    digits: int = Field(default=2, ge=1, le=9)
    """arithmetic: digits of each operand."""
    operators: str = Field(default="+", pattern=r"^[-+*]{1,3}$")
    """arithmetic: the operators to draw from, some of + - *."""
    seed: int = 0
    """Seed of the arithmetic problems and of the shuffle."""
    limit: int | None = Field(default=None, ge=1)
    """Keep at most this many prompts, the first of the source; null keeps all."""
    shuffle: bool = True
    """Whether the stream of prompts takes a new seeded order in every epoch."""
    max_reject_share: float = Field(default=0.01, ge=0.0, le=1.0)
    """Share of refused rows (0 to 1) above which the source is an error."""
    allowed_control_characters: str = "\n"
    """Control characters that a prompt or a ground truth may hold; any other makes the row a reject."""

    @property
    def paths(self) -> tuple[str, ...]:
        """`path` as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @model_validator(mode="after")
    def _path_fits_type(self) -> "DataConfig":
        if self.type == "gsm8k" and len(self.paths) != 1:
            raise ValueError("type gsm8k needs one path: the folder with its train and test files")
        if self.type == "file" and not self.paths:
            raise ValueError("type file needs a path")
        if self.type == "arithmetic" and self.paths:
            raise ValueError("type arithmetic is made from the seed and takes no path")
        return self
