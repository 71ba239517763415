"""What `offbeat eval` evaluates: the folder that an engine loads, and the config that the rest comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from services.compose import load_config, looks_like_path
from services.config import Config
from services.errors import ConfigError
from services.supervised.compose import is_supervised

UNBOUND = ("rollout.max_model_len=null", "rollout.threads=null", "rollout.sampling.max_tokens=1024", "tiny=null")
"""Of a data file without a recipe nothing is known: the model's own longest context, all threads, long responses."""


@contextmanager
def model_folder(model: str) -> Iterator[str]:
    """A Hugging Face folder or hub id for `model`, which may also be a run folder or a checkpoint of ours.

    Of a run folder the newest whole checkpoint. One that holds no whole model (an adapter, shards of several ranks) is
    exported to a folder that lives as long as the context. ValueError where there is nothing to load.
    """
    from services.commands.export import loadable, newest_checkpoint

    path = Path(model).expanduser()
    if not path.is_dir():
        if looks_like_path(model):
            raise ValueError(f"{model}: no such folder")
        yield model
        return
    if (path / "config.json").is_file() and not (path / "manifest.json").is_file():
        yield str(path)
        return
    with loadable(newest_checkpoint(path)) as folder:
        yield str(folder)


def own_recipe(model: str) -> str | None:
    """The config.yaml of the run that a run folder or checkpoint belongs to; None where there is none."""
    path = Path(model).expanduser().resolve()
    found = (folder / "config.yaml" for folder in (path, *path.parents[:2]))
    return next((str(file) for file in found if file.is_file()), None)


def compose(
    folder: str,
    *,
    recipe: str | None,
    data: Path | None,
    reward: str | None,
    engine: str | None,
    overrides: Sequence[str],
) -> Config:
    """The recipe (None: the demo's) with what was said on top, for the model in `folder`. ConfigError, ValueError."""
    said: list[str] = []
    if recipe is not None and is_supervised(recipe):
        if data is None:
            raise ConfigError([f"{recipe}: supervised training has no reward: say --recipe, or --data and --reward"])
        recipe = None
    if data is not None and recipe is None:
        if reward is None:
            raise ValueError("--data without --reward: say what judges the responses, or a --recipe that does")
        said += UNBOUND
    if data is not None:
        said += [
            f"data={json.dumps({'type': 'file', 'path': str(data)})}",
            "evaluation.data=null",
            "evaluation.every_steps=0",
        ]
    if reward is not None:
        said.append(f"reward.functions={json.dumps([{'target': reward}])}")
    if engine is not None:
        said.append(f"rollout.engine={engine}")
    # Nothing is pushed here: whatever the engine holds fits.
    held = [one.partition("=")[2] for one in overrides if one.lstrip("+-").startswith("rollout.dtype=")]
    said += [f"push.dtype={dtype}" for dtype in held]
    rooms = [f"{room}model={json.dumps(folder)}" for room in ("", "rollout.", "trainer.")]
    return load_config(recipe or "demo", [*said, *overrides, *rooms])
