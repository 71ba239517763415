"""Models made on the spot: the small start model that a recipe asks for, and those of real sizes for benches."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from services.config import Config

WARM_START_ROWS = 4096


def make_start_model(config: Config) -> int:
    """Write the model and, where asked, warm-start it on the run's own training prompts; one that is there stays."""
    from rollout.datasets import load_rows
    from trainer.shapes import make_shape
    from trainer.tiny import SHAPES as SMALL
    from trainer.tiny import make_tiny_qwen3

    tiny, folder = config.tiny, Path(config.trainer.model)
    if tiny is None or (folder / "config.json").is_file():
        print(f"{folder}: nothing to make")
        return 0
    if tiny.preset not in SMALL:
        make_shape(tiny.preset, folder, dtype=config.trainer.dtype, seed=tiny.seed)
        return 0
    scratch = folder.with_name(f"{folder.name}.tmp")
    make_tiny_qwen3(scratch, preset=tiny.preset, seed=tiny.seed)
    if tiny.warm_start_steps:
        from trainer.warmstart import warm_start

        train = load_rows(config.data.model_copy(update={"split": "train"})).rows
        test = load_rows(config.data.model_copy(update={"split": "test"})).rows
        pairs = [[(row.text or "", row.ground_truth) for row in rows[:WARM_START_ROWS]] for rows in (train, test)]
        done = warm_start(scratch, pairs[0], held_out=pairs[1], steps=tiny.warm_start_steps, seed=tiny.seed)
        print(f"warm start: {done.steps} supervised steps, held-out accuracy {done.accuracy:.3f}")
    scratch.rename(folder)
    return 0


def make_bench_model(name: str, out: Path, *, dtype: str, seed: int) -> int:
    """Write a model of a real size with random weights; the exit code."""
    from trainer.shapes import make_shape

    began = time.monotonic()
    try:
        make_shape(name, out, dtype=dtype, seed=seed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    num_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(f"{out}: {name}, {num_bytes / 1e9:.2f} GB of weights, {time.monotonic() - began:.1f} s")
    return 0
