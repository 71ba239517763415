"""What benches lie on: a folder that is kept, models of a shape made once in it, and errors told in one line."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

from services.errors import ConfigError, OffbeatError, PeerError

Parameters = ParamSpec("Parameters")
FOLDER = Path(tempfile.gettempdir()) / "offbeat-bench"


def shape_settings(shape: str, folder: Path, *, dtype: str) -> list[str]:
    """Overrides that take the model of this shape, made in a process of its own where it is not there yet."""
    model = folder / "models" / f"{shape}-{dtype}"
    if not (model / "config.json").is_file():
        model.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "services.cli", "make-shape", shape, str(model), "--dtype", dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OffbeatError(f"the model could not be made: {done.stderr.strip() or done.stdout.strip()}")
    words = num_words(model)
    return [f"model={model}", "tiny=null", f"trainer.dtype={dtype}", f"rollout.dtype={dtype}", f"data.words={words}"]


def num_words(model: Path) -> int:
    """Words of the tokenizer that a shape has: all of its vocabulary but pad, eos and unknown."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"]) - 3


def clean_folder(run: Path) -> Path:
    """The run's folder, empty."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    return run


def told(bench: Callable[Parameters, int]) -> Callable[Parameters, int]:
    """What goes wrong in a bench, as a sentence and an exit code."""

    @wraps(bench)
    def telling(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # services of a bench end with it
        try:
            return bench(*args, **kwargs)
        except ConfigError as error:
            print("\n".join(error.problems), file=sys.stderr)
            return 2
        except (OffbeatError, PeerError) as error:
            print(error, file=sys.stderr)
            return 1

    return telling
