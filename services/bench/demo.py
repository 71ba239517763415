"""The demo beside the bare single-process loop: same start model, same task, same batch, same learning rate, same box.

Both keep their weights every few steps while they run; accuracy is measured on those afterwards and costs no run time.
Start-up (process start, imports, model loading) is left out on both sides.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.bench.report import write
from services.compose import load_config
from services.launch import prepare_folder, run_processes

GOAL = 0.85
EVERY = 20
"""Steps between two kept weights."""


def bench_demo(overrides: list[str], *, out: Path | None) -> int:
    """Run one after the other and print both side by side."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = [*overrides, f"run.folder={scratch}", f"trainer.checkpoint.every_steps={EVERY}"]
        settings.append("evaluation.every_steps=0")
        config = load_config("demo", [*settings, "trainer.checkpoint.keep_last=100000"])
        run = prepare_folder(config, fresh=True)
        shutil.copytree(config.trainer.model, folder / "plain")
        run_processes(config, run, plain=False)
        offbeat = of_run(run, config.trainer.model)
        plain = of_plain_loop(
            folder / "plain",
            steps=config.run.num_steps,
            prompts=config.run.prompts_per_step,
            samples=config.run.group_size,
            lr=config.trainer.optimizer.lr,
            seed=config.run.seed,
        )
    show(plain, offbeat)
    return write(out, "demo", {"overrides": overrides, "plain": plain, "offbeat": offbeat})


def of_plain_loop(model: Path, *, steps: int, prompts: int, samples: int, lr: float, seed: int) -> dict[str, Any]:
    """The baseline's own report."""
    command = [sys.executable, "-m", "deploy.recipes.plain_loop", "--model", str(model), "--steps", str(steps)]
    command += ["--prompts", str(prompts), "--samples", str(samples), "--lr", str(lr), "--snapshot-every", str(EVERY)]
    command += ["--seed", str(seed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def of_run(run: Path, start: str) -> dict[str, Any]:
    """The same report for a run of ours, from its checkpoints."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rollout.datasets import DataConfig, load_rows
    from trainer.small.warmstart import greedy_accuracy

    rows = load_rows(DataConfig.model_validate({"type": "arithmetic", "split": "test"})).rows
    test = [(row.text or "", row.ground_truth) for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(start)
    times = {
        int(row["step"]): row["run_seconds"]
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    }
    folders = {0: Path(start), **{int(path.name[5:]): path for path in (run / "checkpoints").glob("step_*")}}
    curve = []
    for step, folder in sorted(folders.items()):
        accuracy = greedy_accuracy(AutoModelForCausalLM.from_pretrained(folder), tokenizer, test)
        curve.append({"step": step, "seconds": round(times.get(step, 0.0), 2), "accuracy": round(accuracy, 4)})
    summary = json.loads((run / "summary.json").read_text())
    reached = next((point for point in curve if point["accuracy"] >= GOAL), None)
    return {
        "wall_seconds": summary["run_seconds"],
        "steps": summary["steps"],
        "accuracy_before": curve[0]["accuracy"],
        "accuracy_after": curve[-1]["accuracy"],
        "seconds_to_85": reached["seconds"] if reached else None,
        "steps_to_85": reached["step"] if reached else None,
        "samples_per_second": summary["samples_per_s"],
        "staleness": summary["staleness"],
        "curve": curve,
    }


def show(plain: dict[str, Any], offbeat: dict[str, Any]) -> None:
    table = Table("", "bare loop, one process", "offbeat demo", title="two-digit addition, same start model")
    names = (
        "accuracy_before",
        "accuracy_after",
        "steps_to_85",
        "seconds_to_85",
        "steps",
        "wall_seconds",
        "samples_per_second",
    )
    for name in names:
        table.add_row(name, str(plain[name]), str(offbeat[name]))
    Console().print(table)
