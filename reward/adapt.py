"""From a user's callable to a RewardFunction: verl's signature is wrapped, a signature of no known form is refused.

verl: (data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float or a dict with "score".
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any, TypeAlias

from reward.function import RewardError, RewardFunction, ScoreItem

VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")

Parameters: TypeAlias = Mapping[str, inspect.Parameter]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def adapt(function: Callable[..., Any], *, name: str) -> RewardFunction:
    """`function` as a RewardFunction. verl's form is recognised by its parameter names.

    As in verl it is called by keyword, True counts as 1.0, a text "pred" is the answer, and other parts of the dict
    that are no numbers are left out.
    Raises RewardError for a signature that takes neither an item nor verl's parameters.
    """
    parameters = _parameters(function)
    if parameters is None:
        return function
    if {"solution_str", "ground_truth"} <= parameters.keys():
        return _from_verl(function, parameters)
    required = [p.name for p in parameters.values() if p.default is p.empty and p.kind in _POSITIONAL]
    takes_item = any(p.kind in (*_POSITIONAL, p.VAR_POSITIONAL) for p in parameters.values())
    if len(required) > 1 or not takes_item:
        raise RewardError(
            f"{name}({', '.join(parameters)}) is no reward function: write {name}(item, *, ...) "
            f"or verl's {name}({', '.join(VERL_PARAMETERS)}=None, **kwargs)"
        )
    return function


def keyword_names(function: Callable[..., Any]) -> list[str] | None:
    """The names that a config may set as `parameters` of `function`; None if it takes any."""
    parameters = _parameters(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    item = [p.name for p in parameters.values() if p.kind in _POSITIONAL][:1]
    return [name for name in named if name not in (*item, *VERL_PARAMETERS)]


def _from_verl(function: Callable[..., Any], parameters: Parameters) -> RewardFunction:
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    passed = [name for name in VERL_PARAMETERS if takes_all or name in parameters]

    @wraps(function)
    def score(item: ScoreItem, **keywords: Any) -> Any:
        values = (item.data_source, item.response, item.ground_truth, dict(item.extra))
        given = {name: value for name, value in zip(VERL_PARAMETERS, values, strict=True) if name in passed}
        raw = function(**given, **keywords)
        return _value_later(raw) if inspect.isawaitable(raw) else _value(raw)

    return score


async def _value_later(raw: Awaitable[Any]) -> Any:
    return _value(await raw)


def _value(raw: Any) -> Any:
    if isinstance(raw, Mapping):
        answer = {"answer": raw["pred"]} if isinstance(raw.get("pred"), str) else {}
        return {key: _number(part) for key, part in raw.items() if key == "score" or not _is_note(part)} | answer
    return _number(raw)


def _number(raw: Any) -> Any:
    return float(raw) if isinstance(raw, bool) else raw


def _is_note(part: object) -> bool:
    return part is None or isinstance(part, (str, bytes, list, tuple, dict, set))


def _parameters(function: Callable[..., Any]) -> Parameters | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None  # some built-in callables have no signature; the self-test and the first item will tell
