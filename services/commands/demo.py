"""`offbeat demo`: evaluate, train, evaluate again, and say what happened."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from services.commands.export import newest_checkpoint
from services.compose import load_config
from services.config import Config
from services.errors import ConfigError, OffbeatError
from services.launch import prepare_folder, run_processes


def run_demo(overrides: list[str], *, engine: str | None = None, fresh: bool) -> int:
    """The whole demo; the last line printed is its summary as JSON."""
    chosen = [] if engine is None else [f"rollout.engine={engine}"]
    if engine not in (None, "hf"):
        chosen.append("launch.rollout_servers=1")  # it brings processes of its own, and two cores are few
    try:
        config = load_config("demo", [*chosen, *overrides])
        summary = demo(config, fresh=fresh)
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except (OffbeatError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(summary))
    return 0


def demo(config: Config, *, fresh: bool) -> dict[str, Any]:
    began = time.monotonic()
    print("1/4  a small model is made and warm-started by supervised steps", flush=True)
    folder = prepare_folder(config, fresh=fresh)
    print("2/4  greedy accuracy on held-out problems before reinforcement learning ... ", end="", flush=True)
    before = accuracy(config.trainer.model)
    print(f"{before:.1%}", flush=True)
    print(f"3/4  {config.run.num_steps} asynchronous steps; logs in {folder}/logs", flush=True)
    run_processes(config, folder, plain=False)
    print("4/4  greedy accuracy on the same problems after it ... ", end="", flush=True)
    after = accuracy(str(newest_checkpoint(folder)))
    print(f"{after:.1%}", flush=True)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    summary = {
        "accuracy_before": before,
        "accuracy_after": after,
        **summary,
        "wall_seconds": round(time.monotonic() - began, 1),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def accuracy(model: str | Path) -> float:
    """Greedy accuracy on the held-out split, measured in a process of its own: the launcher stays small."""
    command = [sys.executable, "-P", "-m", "services.cli", "eval", "--recipe", "demo", "--model", str(model)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OffbeatError(f"the evaluation failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1])["pass@1"])
