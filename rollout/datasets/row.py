"""What every data source hands on: checked prompts, and a located reason for each row that was refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Message = tuple[str, str]
NO_EXTRA: Mapping[str, str] = MappingProxyType({})
BUDGET = "max_tokens"
"""Key in `extra`: response tokens that samples of this prompt may have; the run's own limit holds beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt of a data set: exactly one of `text` and `messages` ((role, content) pairs) is set.

    `prompt_id` is stable and unique in its source, such as "gsm8k/train/17". extra["max_tokens"], where it is set, is
    this prompt's own bound on response tokens. Raises ValueError otherwise.
    """

    prompt_id: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    ground_truth: str
    data_source: str
    response: str | None = None
    """What supervised training teaches to answer; sources that have none, and runs that need none, leave it out."""
    extra: Mapping[str, str] = field(default_factory=lambda: NO_EXTRA)

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"prompt {self.prompt_id} needs either text or messages")
        problem = budget_problem(self.extra)
        if problem:
            raise ValueError(f"prompt {self.prompt_id}: {problem}")


def budget_problem(extra: Mapping[str, str]) -> str:
    """Why extra["max_tokens"] is no number of tokens; empty where it is one or is not there."""
    budget = extra.get(BUDGET)
    if budget is None or (budget.isascii() and budget.isdigit() and 1 <= int(budget) < 1 << 32):
        return ""
    return f"{BUDGET} is {budget[:40]!r}, not a number of response tokens from 1 on"


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
