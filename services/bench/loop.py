"""The whole loop, asynchronous against synchronous: samples and tokens a second, and where the time goes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.bench.report import spread, write
from services.compose import load_config
from services.launch import prepare_folder, run_processes

WARM_STEPS = 10
"""Steps at the start that are not counted."""


def bench_loop(recipe: str, overrides: Sequence[str], *, steps: int, rounds: int, out: Path | None) -> int:
    """Run max_staleness 0 and 2 in turn and report medians over the rounds."""
    rows: dict[str, list[dict[str, float]]] = {"sync": [], "async": []}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        for _ in range(rounds):
            for name, staleness in (("sync", 0), ("async", 2)):
                settings = [
                    *overrides,
                    f"run.max_staleness={staleness}",
                    f"run.num_steps={steps}",
                    f"run.folder={scratch}",
                ]
                rows[name].append(one_run(recipe, [*settings, f"run.name={name}"], model=model))
    figures: dict[str, Any] = {
        name: {key: spread([run[key] for run in runs]) for key in runs[0]} for name, runs in rows.items()
    }
    pairs = zip(rows["async"], rows["sync"], strict=True)
    figures["async_over_sync"] = spread(
        [one["samples_per_s"] / other["samples_per_s"] for one, other in pairs], digits=2
    )
    return write(
        out, "loop", {"recipe": recipe, "overrides": list(overrides), "steps": steps, "rounds": rounds, **figures}
    )


def one_run(recipe: str, overrides: Sequence[str], *, model: Path) -> dict[str, float]:
    """One run from the same start model; its figures per step."""
    settings = list(overrides)
    if model.exists():
        settings += [f"model={model}", "tiny=null"]
    config = load_config(recipe, settings)
    folder = prepare_folder(config, fresh=True)
    if not model.exists():
        shutil.copytree(config.trainer.model, model)
    run_processes(config, folder, plain=False)
    return figures_of(folder)


def figures_of(folder: Path) -> dict[str, float]:
    """What metrics.jsonl and summary.json of a run say, warm-up left out."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    counted = [step for step in steps if step["step"] > WARM_STEPS]
    seconds = counted[-1]["run_seconds"] - steps[WARM_STEPS - 1]["run_seconds"]
    tokens = summary["tokens_per_s"] * summary["run_seconds"] / summary["ledger"]["trained"]
    samples = sum(step["num_samples"] for step in counted)
    step_seconds = seconds / len(counted)
    conductor = sum(step["conductor_cpu_seconds"] for step in counted) / len(counted)
    pushes = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    push_seconds = sorted(event["seconds"] for event in pushes if event["kind"] == "push")
    return {
        "samples_per_s": samples / seconds,
        "tokens_per_s": samples * tokens / seconds,
        "step_ms": 1e3 * step_seconds,
        "train_ms": 1e3 * sum(step["step_seconds"] for step in counted) / len(counted),
        "wait_ms": 1e3 * sum(step["wait_seconds"] for step in counted) / len(counted),
        "push_p50_ms": 1e3 * push_seconds[len(push_seconds) // 2],
        "conductor_cpu_ms": 1e3 * conductor,
        "conductor_share_of_step": conductor / step_seconds,
        "staleness_mean": sum(step["staleness_mean"] for step in counted) / len(counted),
    }
