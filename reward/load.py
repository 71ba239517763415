"""From the target in a config to a RewardSpec: a built-in name, an entry point, or ./path/file.py:function.

User functions are trusted code of the person who wrote the config. They are loaded inside a worker process only, from
these three places only, and never by a name that came in over the network.
"""

import difflib
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from reward.adapt import adapt, keyword_names
from reward.function import RewardError, RewardSpec, ScoreItem, one_line
from reward.functions import FUNCTIONS

ENTRY_POINT_GROUP = "offbeat.rewards"
FORMS = f"a built-in name, an entry point of group {ENTRY_POINT_GROUP}, ./path/file.py:function"


def read_source(target: str) -> bytes | None:
    """The bytes of the file a target names (None if it names no file), without running them.

    Read once, when a scorer starts: every worker, also one started hours later, runs the same bytes.
    """
    if not _names_file(target):
        return None
    path = Path(_split(target)[0])
    try:
        return path.read_bytes()
    except FileNotFoundError:
        beside = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise _unknown(f"no file {path.name!r} in {str(path.parent)!r}", path.name, beside) from None
    except OSError as error:
        raise RewardError(f"cannot read reward file {path.name!r}: {error.strerror}") from None


def load(target: str, *, name: str | None = None, source: bytes | None = None) -> RewardSpec:
    """The RewardSpec that `target` names, renamed to `name` if given. `source` stands for the bytes of its file.

    Raises RewardError that says what was tried, what exists and what is nearest.
    """
    if _names_file(target):
        found = _from_file(target, source=source)
    elif target in FUNCTIONS:
        found = FUNCTIONS[target]
    else:
        found = _from_entry_point(target)
    return replace(found, name=name or found.name)


def configure(spec: RewardSpec, parameters: Mapping[str, Any]) -> RewardSpec:
    """`spec` with its keyword arguments bound, and their digest in its version: other parameters, other reward.

    Raises RewardError for an argument that the function does not take.
    """
    if not parameters:
        return spec
    accepted = keyword_names(spec.function)
    for key in parameters:
        if accepted is not None and key not in accepted:
            raise _unknown(f"{spec.name} takes no parameter {key!r}", key, accepted)
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()
    return replace(spec, version=f"{spec.version}+{digest[:6]}", function=partial(spec.function, **parameters))


def _names_file(target: str) -> bool:
    return target.endswith(".py") or target.rpartition(":")[0].endswith(".py")


def _split(target: str) -> tuple[str, str]:
    file, _, attribute = target.rpartition(":")
    if not file.endswith(".py"):
        raise RewardError(f"{Path(target).name} names a file but no function: write {Path(target).name}:function")
    return file, attribute


def _from_file(target: str, *, source: bytes | None) -> RewardSpec:
    file, attribute = _split(target)
    path = Path(file)
    code = read_source(target) if source is None else source
    assert code is not None
    digest = hashlib.sha256(code).hexdigest()
    members = vars(_load_module(path, code, name=f"_offbeat_reward_{digest[:12]}"))
    if attribute not in members:
        public = [key for key, value in members.items() if callable(value) and not key.startswith("_")]
        raise _unknown(f"{path.name} has no function {attribute!r}", attribute, public)
    spec = _as_spec(members[attribute], name=attribute, version=digest[:12])
    return replace(
        spec, version=digest[:12], self_test=spec.self_test or _self_test(members.get("SELF_TEST", ()), where=path.name)
    )


def _load_module(path: Path, code: bytes, *, name: str) -> ModuleType:
    # These imports are slow, and most workers load built-ins only.
    from importlib.abc import SourceLoader
    from importlib.util import module_from_spec, spec_from_file_location

    class PinnedSource(SourceLoader):
        """Runs the very bytes that were hashed: no second read, and no stale .pyc beside the file."""

        def get_filename(self, fullname: str) -> str:
            return str(path)

        def get_data(self, path: str) -> bytes:
            return code

    loader = PinnedSource()
    module_spec = spec_from_file_location(name, path.resolve(), loader=loader)
    assert module_spec is not None
    module = module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RewardError(f"{path.name} does not load: {type(error).__name__}: {one_line(str(error))}") from error
    return module


def _from_entry_point(target: str) -> RewardSpec:
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if target not in found:
        raise _unknown(f"no reward function {target!r} (may be {FORMS})", target, [*FUNCTIONS, *found])
    entry = found[target]
    try:
        value = entry.load()
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(str(error))}"
        raise RewardError(f"entry point {target!r} does not load: {why}") from error
    return _as_spec(value, name=target, version=entry.dist.version if entry.dist else "0")


def _as_spec(value: object, *, name: str, version: str) -> RewardSpec:
    if isinstance(value, RewardSpec):
        return value
    if not callable(value):
        raise RewardError(f"{name!r} is {type(value).__name__}, neither a function nor a RewardSpec")
    return RewardSpec(name=name, version=version, function=adapt(value, name=name))


def _self_test(samples: Any, *, where: str) -> tuple[tuple[ScoreItem, float], ...]:
    try:
        return tuple(
            (item if isinstance(item, ScoreItem) else ScoreItem(**{"prompt": "", **item}), float(expected))
            for item, expected in samples
        )
    except (TypeError, ValueError) as error:
        raise RewardError(f"SELF_TEST of {where} must be pairs (fields of an item, value): {error}") from None


def _unknown(problem: str, wanted: str, known: Iterable[str]) -> RewardError:
    names = sorted(set(known))
    nearest = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"; nearest: {nearest[0]}" if nearest else ""
    return RewardError(f"{one_line(problem)}; there is: {', '.join(names[:20]) or 'nothing'}{hint}")
