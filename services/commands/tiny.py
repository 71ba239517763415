"""Models made on the spot: the small models that a recipe asks for, and those of real sizes for benches."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rollout.datasets.config import DataConfig
from services.config import Config
from services.configs.models import TinyConfig
from services.supervised.config import SftConfig

WARM_START_ROWS = 4096


def make_models(config: Config) -> int:
    """Write the models that the run begins with; one that is there stays. The exit code."""
    for tiny, folder in config.models_to_make():
        if (folder / "config.json").is_file():
            print(f"{folder}: nothing to make")
        else:
            make_model(tiny, folder, config)
    return 0


def make_model(tiny: TinyConfig, folder: Path, config: Config | SftConfig) -> None:
    """Write a model and, where asked, warm-start it on the run's own training prompts."""
    from trainer.small.shapes import make_shape
    from trainer.small.tiny import SHAPES as SMALL
    from trainer.small.tiny import make_tiny_qwen3

    if tiny.preset not in SMALL:
        make_shape(tiny.preset, folder, dtype=config.trainer.dtype, seed=tiny.seed)
        return
    scratch = folder.with_name(f"{folder.name}.tmp")
    make_tiny_qwen3(scratch, preset=tiny.preset, seed=tiny.seed)
    if tiny.warm_start_steps:
        warm_start_on(config.data, tiny, scratch)
    scratch.rename(folder)


def warm_start_on(data: DataConfig, tiny: TinyConfig, folder: Path) -> None:
    """Supervised steps on the training split, until the accuracy on the other is enough."""
    from rollout.datasets import load_rows
    from trainer.small.warmstart import warm_start

    train, test = (load_rows(data.model_copy(update={"split": split})).rows for split in ("train", "test"))
    pairs = [[(row.text or "", row.ground_truth) for row in rows[:WARM_START_ROWS]] for rows in (train, test)]
    done = warm_start(
        folder,
        pairs[0],
        held_out=pairs[1],
        steps=tiny.warm_start_steps,
        seed=tiny.seed,
        target_accuracy=tiny.warm_start_accuracy,
    )
    print(f"warm start of {folder.stem}: {done.steps} supervised steps, held-out accuracy {done.accuracy:.3f}")


def make_bench_model(name: str, out: Path, *, dtype: str, seed: int) -> int:
    """Write a model of a real size with random weights; the exit code."""
    from trainer.small.shapes import make_shape

    began = time.monotonic()
    try:
        make_shape(name, out, dtype=dtype, seed=seed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    num_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(f"{out}: {name}, {num_bytes / 1e9:.2f} GB of weights, {time.monotonic() - began:.1f} s")
    return 0
