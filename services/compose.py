"""YAML and overrides to a checked Config: all mistakes in one report, each with path, line and nearest valid key."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from services.config import Config
from services.configs.pointers import follow_pointers
from services.errors import ConfigError
from trainer.config import CHECKED

RECIPES = Path(__file__).resolve().parent.parent / "deploy" / "recipes"
Places = dict[tuple[str, ...], str]
"""Where each key was said: `file:line`, or the override."""
ROOMS_WITH_MODEL = ("rollout", "trainer")
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
KEY = re.compile(r"\b[a-z_]+(\.[a-z0-9_]+)+\b")


def load_config(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe (a name in deploy/recipes or a path), apply `a.b=c` overrides; ConfigError tells every mistake."""
    values, places = read_yaml(find_recipe(recipe))
    if "sft" in values:
        raise ConfigError(
            [f"{place_of(('sft',), places)}: sft: supervised training is started by offbeat sft {recipe}"]
        )
    problems = [problem for override in overrides if (problem := apply_override(values, override, places))]
    problems += [f"{place_of(key, places)}: {'.'.join(key)}: {text}" for key, text in follow_pointers(values)]
    share_model(values)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems.extend(explain(error, places))
    else:
        problems.extend(missing_files(config, places))
    if problems:
        raise ConfigError(problems)
    return config


def load_json(text: str) -> Config:
    """The config as a conductor hands it on."""
    return Config.model_validate(json.loads(text), context=CHECKED)


def override_section(config: Config, section: str, overrides: Sequence[str]) -> Config:
    """A service's own settings on top of the run's: its section alone, for the run fits together as it is."""
    values = config.model_dump(mode="json")
    places: Places = {(): "overrides"}
    problems = [problem for override in overrides if (problem := apply_override(values, override, places))]
    problems += [
        f"{place}: a {section} service takes settings of {section} only; the others are the run's"
        for path, place in places.items()
        if path and path[0] != section
    ]
    try:
        changed = type(getattr(config, section)).model_validate(values[section])
    except ValidationError as error:
        for detail in error.errors():
            problems.extend(mistakes(dict(detail) | {"loc": (section, *detail["loc"])}, places))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config.model_copy(update={section: changed})


def find_recipe(name: str) -> Path:
    for path in (Path(name).expanduser(), RECIPES / f"{name}.yaml"):
        if path.is_file():
            return path
    known = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError([f"{name}: no such recipe or file{hint} (recipes: {', '.join(known)})"])


def read_yaml(path: Path) -> tuple[dict[str, Any], Places]:
    """The values of a YAML file and the place of each key."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = {} if node is None else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = 1 if mark is None else mark.line + 1
        raise ConfigError([f"{path}:{line}: is not YAML: {getattr(error, 'problem', None) or error}"]) from error
    if not isinstance(values, dict):
        raise ConfigError([f"{path}:1: expected keys and values, found {type(values).__name__}"])
    return values, {(): f"{path}:1", **{key: f"{path}:{line}" for key, line in key_lines(node, ())}}


def key_lines(node: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The line (from 1) of every key and list item."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            yield inner, key.start_mark.line + 1
            yield from key_lines(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            inner = (*path, str(index))
            yield inner, value.start_mark.line + 1
            yield from key_lines(value, inner)


def apply_override(values: dict[str, Any], override: str, places: Places) -> str:
    """Set `a.b=c` (also --a.b=c, +a.b=c, ++a.b=c) in place; returns a problem or an empty string."""
    key, equals, text = override.lstrip("-+").partition("=")
    if not equals or not all(key.split(".")):
        return f"{override}: an override is written key.path=value"
    *parents, last = key.split(".")
    target = values
    for name in parents:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            return f"{override}: {name} is a value, not a section"
    try:
        target[last] = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        return f"{override}: the value is not YAML: {getattr(error, 'problem', None) or error}"
    if EXPONENT.fullmatch(text):
        target[last] = float(text)  # YAML 1.1 reads 1e-6 as text
    for depth in range(1, len(parents) + 1):
        places.setdefault(tuple(parents[:depth]), override)
    places[(*parents, last)] = override
    return ""


def share_model(values: dict[str, Any]) -> None:
    """The start model, the temperature and the token limit are said once and hold for every room."""
    model = values.get("model")
    if model is None and values.get("tiny") is not None:
        run = dig(values, "run")
        model = values["model"] = str(Path(str(run.get("folder", "outputs"))) / str(run.get("name", "")) / "model")
    if dig(values, "reference").get("tiny") is not None:
        run = dig(values, "run")
        teacher = str(Path(str(run.get("folder", "outputs"))) / str(run.get("name", "")) / "teacher")
        values["reference"].setdefault("model", teacher)
    for room in ROOMS_WITH_MODEL:
        section = values.setdefault(room, {})
        if isinstance(section, dict) and model is not None:
            section.setdefault("model", model)
    sampling = dig(values, "rollout", "sampling")
    trainer = values.get("trainer")
    if sampling and "temperature" in sampling and isinstance(trainer, dict):
        algorithm = trainer.setdefault("algorithm", {})
        if isinstance(algorithm, dict):
            algorithm.setdefault("temperature", sampling["temperature"])
    overlong = dig(values, "trainer", "algorithm", "overlong")
    if overlong and "max_tokens" in sampling:
        overlong.setdefault("limit", sampling["max_tokens"])


def dig(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    found: Any = values
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def explain(error: ValidationError, places: Places, root: type[BaseModel] = Config) -> list[str]:
    """One line for each mistake: place: key: what, and what was meant."""
    return [line for detail in error.errors() for line in mistakes(dict(detail), places, root)]


def mistakes(detail: dict[str, Any], places: Places, root: type[BaseModel] = Config) -> list[str]:
    path = tuple(str(part) for part in detail["loc"] if part != "[key]")
    message = str(detail["msg"]).removeprefix("Value error, ")
    if not path:  # rooms that do not fit together: each text names the keys that it is about
        return [f"{place_of(key_in(text), places)}: {text}" for text in message.split("; ")]
    where, key = place_of(path, places), ".".join(path)
    if detail["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(path[-1], valid_keys(path[:-1], root), n=1, cutoff=0.4)
        hint = f"; did you mean {'.'.join((*path[:-1], nearest[0]))}?" if nearest else ""
        return [f"{where}: {key}: unknown key{hint}"]
    if detail["type"] == "missing":
        return [f"{where}: {key}: is required"]
    given = detail.get("input")
    shown = "" if isinstance(given, (dict, BaseModel)) else f" (got {given!r})"
    return [f"{where}: {key}: {message}{shown}"]


def key_in(text: str) -> tuple[str, ...]:
    """The first key that a sentence names."""
    found = KEY.search(text)
    return tuple(found.group().split(".")) if found else ()


def place_of(path: tuple[str, ...], places: Places) -> str:
    """Where the key was said, or the nearest section above it."""
    while path not in places:
        path = path[:-1]
    return places[path]


def valid_keys(path: tuple[str, ...], root: type[BaseModel]) -> list[str]:
    """The keys of the section at `path`."""
    model: Any = root
    for name in path:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
        field = model.model_fields.get(name)
        model = section_type(field.annotation) if field is not None else model
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def section_type(annotation: Any) -> Any:
    """The section class inside X, X | None or list[X]."""
    inner = [
        part for part in getattr(annotation, "__args__", ()) if isinstance(part, type) and issubclass(part, BaseModel)
    ]
    return inner[0] if inner else annotation


def missing_files(config: Config, places: Places) -> list[str]:
    """Folders and files that the config names and that are not there."""
    problems = [
        f"{place_of(key, places)}: {'.'.join(key)}: no model folder at {model}"
        for key, model in models(config)
        if looks_like_path(model) and not (Path(model).expanduser() / "config.json").is_file()
    ]
    for section, data in ((("data",), config.data), (("evaluation", "data"), config.evaluation.data)):
        for path in data.paths if data is not None else ():
            if not Path(path).expanduser().exists():
                named = (*section, "path")
                problems.append(f"{place_of(named, places)}: {'.'.join(named)}: no such file: {path}")
    for key, python in pythons(config):
        if not is_executable(python):
            problems.append(f"{place_of(key, places)}: {'.'.join(key)}: no such Python: {python}")
    return sorted(set(problems))


def models(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every model that has to be there already, with its key."""
    if config.tiny is None:
        for room, model in (("rollout", config.rollout.model), ("trainer", config.trainer.model)):
            yield ("model",) if config.model == model else (room, "model"), model
    if config.reference.tiny is None and config.reference.model is not None:
        yield ("reference", "model"), config.reference.model
    if config.trainer.critic is not None and config.trainer.critic.model is not None:
        yield ("trainer", "critic", "model"), config.trainer.critic.model


def pythons(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every Python that the config names, with its key."""
    for role, python in config.launch.python.items():
        yield ("launch", "python", role), python
    for index, member in enumerate(config.launch.fleet):
        if member.python is not None:
            yield ("launch", "fleet", str(index), "python"), member.python


def is_executable(path: str | Path) -> bool:
    found = Path(path).expanduser()
    return found.is_file() and os.access(found, os.X_OK)


def looks_like_path(model: str) -> bool:
    """A hub id has exactly one slash and no dot or tilde in front; everything else is a path."""
    return model.startswith((".", "/", "~")) or model.count("/") != 1 or Path(model).exists()
