"""Estimators and losses that a user wrote, named in the config. Imports the standard library only.

    ./mine.py:my_estimator   a function in a file; the file runs under a private module name
    my_estimator             an entry point of the kind's group, installed with some package

`check` finds a target without running anything, `load` runs it.
"""

import ast
import difflib
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is looked for."""

    noun: str
    group: str
    """Of entry points."""
    known: tuple[str, ...]
    """Names that are built in."""


class PluginError(ValueError):
    """What was looked for, what there is, and what is nearest."""


def check(target: str, kind: Kind) -> str:
    """`target`, where it is built in, installed, or a file that binds the function; else PluginError."""
    if target in kind.known:
        return target
    if _names_file(target):
        file, function = _split(target)
        _bound(ast_of(file), function, where=file.name)
    elif target not in _installed(kind):
        raise _unknown(f"unknown {kind.noun} {target!r}", target, (*kind.known, *_installed(kind)))
    return target


def declares(target: str, kind: Kind, trait: str) -> bool:
    """Whether the source of a user's function says `function.trait = True` at its top level; nothing is imported.

    False for what is built in, and where the source is not on this machine.
    """
    if target in kind.known:
        return False
    try:
        file, function = _split(target) if _names_file(target) else _source(_installed(kind)[target])
        lines = ast_of(file).body
    except (PluginError, KeyError):
        return False
    said = f"{function}.{trait} = True"
    return any(isinstance(line, ast.Assign) and ast.unparse(line) == said for line in lines)


def load(target: str, kind: Kind, built_in: Mapping[str, Function], *, returns: type) -> Function:
    """The function that `target` names; a user's takes (inputs, options) and has to give `returns`.

    Raises PluginError where it is not there, does not load or takes other arguments, and on a call that gives another
    type.
    """
    if target in built_in:
        return built_in[target]
    value = _from_file(target) if _names_file(target) else _from_entry_point(check(target, kind), kind)
    if not callable(value):
        raise PluginError(f"{target} is {type(value).__name__}, not a function (inputs, options) -> {returns.__name__}")
    try:
        inspect.signature(value).bind(None, None)
    except TypeError:
        said = f"{target} takes {inspect.signature(value)}"
        raise PluginError(f"{said}; write it as (inputs, options) -> {returns.__name__}") from None
    return _held_to(value, target, returns)  # type: ignore[return-value]


def ast_of(file: Path) -> ast.Module:
    """The syntax of a Python file; PluginError where it is not there or is no Python."""
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except FileNotFoundError:
        beside = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise _unknown(f"no file {file.name!r} in {str(file.parent)!r}", file.name, beside) from None
    except OSError as error:
        raise PluginError(f"{file} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise PluginError(f"{file}:{getattr(error, 'lineno', 1)}: is not Python: {error}") from None


def _held_to(function: Callable[..., object], target: str, returns: type) -> Callable[..., object]:
    @wraps(function)
    def checked(inputs: object, options: object) -> object:
        found = function(inputs, options)
        if not isinstance(found, returns):
            raise PluginError(f"{target} gave {type(found).__name__}; it has to give {returns.__name__}")
        return found

    return checked


def _names_file(target: str) -> bool:
    return target.endswith(".py") or target.rpartition(":")[0].endswith(".py")


def _split(target: str) -> tuple[Path, str]:
    file, _, function = target.rpartition(":")
    if not file.endswith(".py") or not function:
        name = target.removesuffix(":")
        raise PluginError(f"{name} names a file but no function: write {name}:function")
    return Path(file).expanduser(), function


def _bound(tree: ast.Module, wanted: str, *, where: str) -> None:
    """PluginError where no line at the top level of a file defines, assigns or imports a name."""
    functions = [line.name for line in tree.body if isinstance(line, ast.FunctionDef)]
    imported = [
        alias.asname or alias.name
        for line in tree.body
        if isinstance(line, (ast.Import, ast.ImportFrom))
        for alias in line.names
    ]
    assigned = [
        node.id
        for line in tree.body
        if isinstance(line, (ast.Assign, ast.AnnAssign))
        for node in ast.walk(line)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    if wanted not in {*functions, *imported, *assigned}:
        raise _unknown(f"{where} has no function {wanted!r}", wanted, functions)


def _installed(kind: Kind) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=kind.group)}


def _source(entry: EntryPoint) -> tuple[Path, str]:
    """The file of an entry point and the name in it, found without importing its package."""
    path = None
    for name in entry.module.split("."):
        spec = PathFinder.find_spec(name, path)
        path = None if spec is None else spec.submodule_search_locations
    if spec is None or spec.origin is None:
        raise PluginError(f"entry point {entry.name!r} has no source here")
    return Path(spec.origin), entry.attr


def _from_file(target: str) -> object:
    file, function = _split(target)
    _bound(ast_of(file), function, where=file.name)
    name = f"_offbeat_plugin_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    spec = spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module: Any = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(f"{file.name} does not load: {type(error).__name__}: {error}") from error
    return getattr(module, function)


def _from_entry_point(target: str, kind: Kind) -> object:
    try:
        return _installed(kind)[target].load()
    except Exception as error:
        raise PluginError(f"entry point {target!r} does not load: {type(error).__name__}: {error}") from error


def _unknown(problem: str, wanted: str, known: Iterable[str]) -> PluginError:
    names = list(dict.fromkeys(known))
    nearest = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return PluginError(f"{problem}; {hint}existing: {', '.join(names) or 'nothing'}")
