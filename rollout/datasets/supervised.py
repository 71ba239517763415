"""Rows to learn from by imitation: a prompt, text or messages, and the response to it.

response     prompt, response
preference   prompt, chosen
chat         a list of messages whose last one is the assistant's: that one is the response, the others are the prompt

A ground truth may be missing: nothing is scored.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.datasets.config import DataConfig
from rollout.datasets.files import file_rows
from rollout.datasets.layouts import RowError, checked_prompt, checked_text
from rollout.datasets.row import LoadReport, PromptRow, Reject

RESPONSE_KEYS = ("response", "chosen")


def supervised_rows(source: DataConfig) -> LoadReport:
    """The rows of files, read as the source says."""
    read = partial(supervised_row, prompt_key=source.prompt_key, response_key=source.response_key)
    return file_rows(source.paths, allowed_control_characters=source.allowed_control_characters, read=read)


def with_responses(report: LoadReport, *, path: str) -> LoadReport:
    """Rows without a response are refused; they are counted from 1 in what `path` made."""
    missing = [number for number, row in enumerate(report.rows, start=1) if row.response is None]
    return replace(
        report,
        rows=tuple(row for row in report.rows if row.response is not None),
        rejects=(*report.rejects, *(Reject(path=path, line=number, reason="no response") for number in missing)),
    )


def supervised_row(
    record: Mapping[str, Any],
    *,
    prompt_id: str,
    data_source: str,
    allowed: str = "\n",
    prompt_key: str = "prompt",
    response_key: str | None = None,
) -> PromptRow:
    """The row of a record; RowError where prompt or response is missing, empty, or of a wrong type."""
    prompt, response = field(record, prompt_key), _response(record, response_key)
    if prompt is None:
        raise RowError(f"no {prompt_key} (fields: {', '.join(map(str, record)) or 'none'})")
    if response is None and response_key is None and _ends_in_answer(prompt):
        prompt, response = prompt[:-1], prompt[-1].get("content")
    if response is None:
        raise RowError(f"no {response_key or ' or '.join(RESPONSE_KEYS)} (fields: {', '.join(map(str, record))})")
    text, messages = checked_prompt({"prompt": prompt}, allowed=allowed)
    return PromptRow(
        prompt_id=prompt_id,
        text=text,
        messages=messages,
        ground_truth="",
        data_source=data_source,
        response=checked_text(response, what=response_key or "response", allowed=allowed),
    )


def field(record: Mapping[str, Any], key: str) -> Any:
    """`a`, or `b` inside `a` for a.b; None where there is none."""
    if key in record:
        return record[key]
    outer, dot, inner = key.partition(".")
    held = record.get(outer) if dot else None
    return field(held, inner) if isinstance(held, Mapping) else None


def _response(record: Mapping[str, Any], key: str | None) -> Any:
    keys = RESPONSE_KEYS if key is None else (key,)
    return next((value for one in keys if (value := field(record, one)) is not None), None)


def _ends_in_answer(prompt: Any) -> bool:
    last = prompt[-1] if isinstance(prompt, list) and len(prompt) > 1 else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"
