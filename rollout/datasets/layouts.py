"""One record of a data file -> one checked prompt, in any of the layouts that users have on disk.

verl         data_source, prompt (chat list or text), reward_model.ground_truth, extra_info
simple       prompt, ground_truth or answer
scored       prompt, response, reward (the response stands as ground truth)
preference   prompt, chosen, rejected (the chosen one stands as ground truth)

In any of them max_tokens (a field of the record or of extra_info) bounds the responses to this prompt.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from rollout.datasets.row import Message, PromptRow, budget_problem

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
GROUND_TRUTH_KEYS = ("ground_truth", "answer", "response", "chosen")


class RowError(ValueError):
    """A row that cannot be used; its text is the reason."""


def row_of(record: Mapping[str, Any], *, prompt_id: str, data_source: str, allowed: str = "\n") -> PromptRow:
    """The prompt of a record. `data_source` is taken when the record names none, `allowed` are its control characters.

    Raises RowError with the reason: a missing or empty field, a wrong type, a control character.
    """
    text, messages = checked_prompt(record, allowed=allowed)
    _check_reward(record)
    source = record.get("data_source")
    return PromptRow(
        prompt_id=prompt_id,
        text=text,
        messages=messages,
        ground_truth=_ground_truth(record, allowed=allowed),
        data_source=data_source if source is None else checked_text(source, what="data_source", allowed=""),
        extra=_extra(record),
    )


def checked_prompt(record: Mapping[str, Any], *, allowed: str) -> tuple[str | None, tuple[Message, ...] | None]:
    """Text or messages of `prompt`; RowError."""
    prompt = record.get("prompt")
    if prompt is None:
        hint = "; a raw GSM8K file is read with type gsm8k" if "question" in record else ""
        raise RowError(f"no prompt (fields: {', '.join(map(str, record)) or 'none'}{hint})")
    if isinstance(prompt, str):
        return checked_text(prompt, what="prompt", allowed=allowed), None
    if not isinstance(prompt, list):
        raise RowError(f"wrong type: prompt is {_kind(prompt)}, not text or a list of messages")
    if not prompt:
        raise RowError("empty prompt")
    return None, tuple(_message(message, allowed=allowed) for message in prompt)


def _message(message: object, *, allowed: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RowError(f"wrong type: a message of the prompt is {_kind(message)}, not an object with role and content")
    return message["role"], checked_text(message.get("content"), what="prompt", allowed=allowed)


def _ground_truth(record: Mapping[str, Any], *, allowed: str) -> str:
    holder = record.get("reward_model")
    if isinstance(holder, Mapping) and holder.get("ground_truth") is not None:
        return _truth_text(holder["ground_truth"], what="reward_model.ground_truth", allowed=allowed)
    for key in GROUND_TRUTH_KEYS:
        if record.get(key) is not None:
            return _truth_text(record[key], what=key, allowed=allowed)
    raise RowError(f"missing ground truth (none of reward_model.ground_truth, {', '.join(GROUND_TRUTH_KEYS)})")


def _truth_text(value: object, *, what: str, allowed: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return checked_text(value, what=what, allowed=allowed)


def _check_reward(record: Mapping[str, Any]) -> None:
    """A stored reward must be a finite number, and a response without a truth beside it must have one."""
    scored = "response" in record and not {"ground_truth", "answer", "reward_model"} & set(record)
    if "reward" not in record:
        if scored:
            near = [key for key in record if key.lower() == "reward"]
            raise RowError(f"missing reward{f' (there is {near[0]!r})' if near else ''}")
        return
    reward = record["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise RowError(f"wrong type: reward is {_kind(reward)}, not a number")
    if not math.isfinite(reward):
        raise RowError(f"reward is {reward}, not a finite number")


def checked_text(value: object, *, what: str, allowed: str) -> str:
    """Text that is not empty, without control characters other than `allowed`; RowError."""
    if not isinstance(value, str):
        raise RowError(f"wrong type: {what} is {_kind(value)}, not text")
    if not value.strip():
        raise RowError(f"empty {what}")
    for found in CONTROL.finditer(value):
        if found[0] not in allowed:
            raise RowError(f"control character {found[0]!a} in {what}, at character {found.start()}")
    return value


def _extra(record: Mapping[str, Any]) -> dict[str, str]:
    """Everything else as text: the fields of extra_info, and the record's own other fields that do not hide them."""
    info = record.get("extra_info")
    fields = {key: value for key, value in record.items() if key not in {"prompt", "data_source", "extra_info"}}
    fields |= info if isinstance(info, Mapping) else {}
    extra = {str(key): _as_text(value) for key, value in fields.items() if value is not None}
    problem = budget_problem(extra)
    if problem:
        raise RowError(problem)
    return extra


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)
