"""`offbeat export`: a checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

TRAINING_ONLY = {"optimizer.safetensors", "state.json", "manifest.json"}


def newest_checkpoint(source: Path) -> Path:
    """The newest whole checkpoint of a run folder, or the checkpoint itself; ValueError where there is none."""
    from trainer.checkpoint import CheckpointStore
    from trainer.config import CheckpointConfig
    from trainer.durable import problems

    if (source / "manifest.json").is_file():
        found = problems(source)
        if found:
            raise ValueError("; ".join(found))
        return source
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    if not folder.is_dir():
        raise ValueError(f"{source}: no such run or checkpoint folder")
    path, _ = CheckpointStore(folder, CheckpointConfig(), incarnation=0).latest_verified()
    if path is None:
        raise ValueError(f"{folder}: no whole checkpoint")
    return path


def export_model(source: Path, out: Path) -> int:
    """Copy what AutoModelForCausalLM and vLLM need; refuses to write into a folder that holds something."""
    try:
        checkpoint = newest_checkpoint(source)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if out.exists() and any(out.iterdir()):
        print(f"{out}: is not empty", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(checkpoint.iterdir()):
        if file.name not in TRAINING_ONLY:
            shutil.copyfile(file, out / file.name)
    print(f"{checkpoint} -> {out}")
    return 0
