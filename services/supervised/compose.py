"""YAML and overrides to a checked config of supervised training; mistakes are told as those of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.compose import Places, apply_override, dig, explain, find_recipe, looks_like_path, place_of, read_yaml
from services.configs.pointers import follow_pointers
from services.errors import ConfigError
from services.supervised.config import SftConfig


def load_sft_config(recipe: str, overrides: Sequence[str] = ()) -> SftConfig:
    """Read a recipe (a name in deploy/recipes or a path), apply `a.b=c` overrides; ConfigError tells every mistake."""
    values, places = read_yaml(find_recipe(recipe))
    problems = [problem for override in overrides if (problem := apply_override(values, override, places))]
    problems += [f"{place_of(key, places)}: {'.'.join(key)}: {text}" for key, text in follow_pointers(values)]
    share(values)
    try:
        config = SftConfig.model_validate(values)
    except ValidationError as error:
        problems.extend(explain(error, places, SftConfig))
    else:
        problems.extend(missing_files(config, places))
    if problems:
        raise ConfigError(problems)
    return config


def is_supervised(recipe: str) -> bool:
    """Whether a recipe is one of supervised training."""
    return "sft" in read_yaml(find_recipe(recipe))[0]


def share(values: dict[str, Any]) -> None:
    """The start model and the number of steps are said once."""
    run, steps = dig(values, "run"), dig(values, "sft").get("num_steps")
    if values.get("model") is None and values.get("tiny") is not None:
        values["model"] = str(Path(str(run.get("folder", "outputs"))) / str(run.get("name", "")) / "model")
    trainer = values.setdefault("trainer", {})
    if isinstance(trainer, dict) and values.get("model") is not None:
        trainer.setdefault("model", values["model"])
    optimizer = dig(values, "trainer", "optimizer")
    if steps is not None and optimizer.get("schedule", "constant") != "constant":
        optimizer.setdefault("total_steps", steps)


def missing_files(config: SftConfig, places: Places) -> list[str]:
    """Folders and files that the config names and that are not there."""
    problems, model = [], config.trainer.model
    if config.tiny is None and looks_like_path(model) and not (Path(model).expanduser() / "config.json").is_file():
        key = ("model",) if config.model == model else ("trainer", "model")
        problems.append(f"{place_of(key, places)}: {'.'.join(key)}: no model folder at {model}")
    for section, data in ((("data",), config.data), (("sft", "held_out"), config.sft.held_out)):
        for path in data.paths if data is not None else ():
            if not Path(path).expanduser().exists():
                named = (*section, "path")
                problems.append(f"{place_of(named, places)}: {'.'.join(named)}: no such file: {path}")
    return problems
