"""What every data source hands on: checked prompts, and a located reason for each row that was refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Message = tuple[str, str]
NO_EXTRA: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt of a data set: exactly one of `text` and `messages` ((role, content) pairs) is set.

    `prompt_id` is stable and unique in its source, such as "gsm8k/train/17". Raises ValueError otherwise.
    """

    prompt_id: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    ground_truth: str
    data_source: str
    extra: Mapping[str, str] = field(default_factory=lambda: NO_EXTRA)

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"prompt {self.prompt_id} needs either text or messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A refused row: the file, the line (JSONL) or row (parquet) counted from 1, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Everything that was in a source: `len(rows) + len(rejects)` is the number of rows read."""

    rows: tuple[PromptRow, ...]
    rejects: tuple[Reject, ...] = ()

    @property
    def reject_share(self) -> float:
        """Refused rows over all rows, 0 to 1; 0 for an empty source."""
        total = len(self.rows) + len(self.rejects)
        return len(self.rejects) / total if total else 0.0
