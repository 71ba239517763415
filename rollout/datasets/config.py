"""Where the prompts come from: the data part of the run's config."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DataConfig(BaseModel):
    """One source of prompts. A mistake is a ValidationError before anything is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: Literal["arithmetic", "gsm8k", "file", "random"] = "arithmetic"
    """arithmetic and random are made from the seed, gsm8k reads a folder, file reads parquet or JSONL files."""
    path: str | tuple[str, ...] = ()
    """file: one or more parquet, JSONL or JSON-lines files. gsm8k: the folder of {train,test}.parquet or .jsonl."""
    split: Literal["train", "test"] = "train"
    """arithmetic and gsm8k: which split. The test split shares no problem with the train split."""
    size: int | None = Field(default=None, ge=1)
    """arithmetic and random: number of prompts; null is the whole split (arithmetic) or 1024 (random)."""
    digits: int = Field(default=2, ge=1, le=9)
    """arithmetic: digits of each operand."""
    operators: str = Field(default="+", pattern=r"^[-+*]{1,3}$")
    """arithmetic: the operators to draw from, some of + - *."""
    prompt_tokens: int = Field(default=128, ge=1)
    """random: words in a prompt; the models of offbeat make-shape read each as one token."""
    words: int = Field(default=151_000, ge=1)
    """random: how many different words there are to draw from."""
    response_mean: float | None = Field(default=None, gt=0)
    """random: mean of the response tokens that a prompt allows (long-tailed); null: the same for all."""
    response_sigma: float = Field(default=1.0, gt=0)
    """random: spread of those lengths, the standard deviation of their logarithm."""
    response_min: int = Field(default=1, ge=1)
    """random: shortest of those lengths, in tokens."""
    response_max: int = Field(default=512, ge=1)
    """random: longest of those lengths, in tokens."""
    prompt_key: str = Field(default="prompt", min_length=1)
    """file, offbeat sft: field with the prompt, text or messages; a.b is the field b inside a."""
    response_key: str | None = Field(default=None, min_length=1)
    """file, offbeat sft: field with the response to learn; null: response or chosen, or the last message of the prompt
    where that is the assistant's."""
    seed: int = 0
    """Seed of what is made and of the shuffle."""
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
        if self.type in ("arithmetic", "random") and self.paths:
            raise ValueError(f"type {self.type} is made from the seed and takes no path")
        if self.response_mean is not None and not self.response_min < self.response_mean < self.response_max:
            raise ValueError(f"response_mean={self.response_mean:g} must lie between response_min and response_max")
        return self
