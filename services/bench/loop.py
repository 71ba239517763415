"""The whole loop, asynchronous against synchronous: samples and tokens a second, and where the time goes."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.bench.bed import shape_settings, told
from services.bench.report import keep, percentile, spread, write
from services.commands.placement import placement, visible_gpus
from services.compose import load_config
from services.launch import prepare_folder, run_processes

if TYPE_CHECKING:
    from services.config import Config

MODES = {"sync": 0, "async": 2}
"""name -> max_staleness."""
Lines = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopWork:
    """What is measured. Units: steps."""

    recipe: str
    shape: str
    """Empty: the model that the recipe makes."""
    modes: tuple[str, ...]
    steps: int
    warm_steps: int
    """At the start, not counted."""
    rounds: int


@told
def bench_loop(work: LoopWork, overrides: Sequence[str], *, folder: Path, out: Path | None) -> int:
    """Run the modes in turn and report medians over the rounds; the JSON is there after each run."""
    rows: dict[str, Lines] = {mode: [] for mode in work.modes}
    model = folder / "models" / f"start-{Path(work.recipe).stem}"
    shutil.rmtree(model, ignore_errors=True)
    figures: dict[str, Any] = {"work": {name: getattr(work, name) for name in work.__slots__}}
    figures["overrides"] = list(overrides)
    for _ in range(work.rounds):
        for mode in work.modes:
            config = config_of(work, mode, overrides, folder, model)
            rows[mode].append(one_run(config, model=model, warm_steps=work.warm_steps))
            figures |= {"placement": placement(config, visible_gpus()), **medians(rows)}
            keep(out, "loop", figures)
    return write(out, "loop", figures)


def config_of(work: LoopWork, mode: str, overrides: Sequence[str], folder: Path, model: Path) -> Config:
    """The recipe in this mode; the model is made once and used again."""
    settings = list(overrides)
    if work.shape:
        dtype = "bfloat16" if visible_gpus() else "float32"
        settings = [*shape_settings(work.shape, folder, dtype=dtype), *settings]
    elif (model / "config.json").is_file():
        settings += [f"model={model}", "tiny=null"]
    settings += [f"run.max_staleness={MODES[mode]}", f"run.num_steps={work.steps}"]
    alone = "evaluation.every_steps=0"  # bare loops evaluate nothing
    return load_config(work.recipe, [alone, *settings, f"run.folder={folder}", f"run.name=loop-{mode}"])


def one_run(config: Config, *, model: Path, warm_steps: int) -> dict[str, Any]:
    """One run from the start model; its figures."""
    run = prepare_folder(config, fresh=True)
    if config.tiny is not None:
        shutil.copytree(config.trainer.model, model)
    run_processes(config, run, plain=False)
    prompt_tokens = config.data.prompt_tokens if config.data.type == "random" else 0
    return figures_of(run, warm_steps=warm_steps, prompt_tokens=prompt_tokens)


def figures_of(run: Path, *, warm_steps: int, prompt_tokens: int = 0) -> dict[str, float]:
    """What a run's metrics and events say, the first steps left out. prompt_tokens: of each prompt, where known."""
    steps, events = lines(run / "metrics.jsonl"), lines(run / "events.jsonl")
    counted = [step for step in steps if step["step"] > warm_steps]
    began = steps[warm_steps - 1]["run_seconds"] if warm_steps else 0.0
    seconds = counted[-1]["run_seconds"] - began
    samples, tokens = total(counted, "num_samples"), total(counted, "tokens")
    busy, conductor = total(counted, "step_seconds"), total(counted, "conductor_cpu_seconds")
    return {
        "samples_per_s": samples / seconds,
        "tokens_per_s": tokens / seconds,
        "train_tokens_per_s": (tokens + prompt_tokens * samples) / busy,
        "step_ms": 1e3 * seconds / len(counted),
        "train_ms": 1e3 * busy / len(counted),
        "wait_ms": 1e3 * total(counted, "wait_seconds") / len(counted),
        **pushes_of([event for event in events if event["kind"] == "push" and event["policy_version"] > warm_steps]),
        "conductor_cpu_ms": 1e3 * conductor / len(counted),
        "conductor_share_of_step": conductor / seconds,
        "staleness_mean": total(counted, "staleness_mean") / len(counted),
        **mismatch_of(counted),
    }


def pushes_of(pushes: Lines) -> dict[str, float]:
    """Milliseconds of the pushes of a run and of the standstills that they cost."""
    if not pushes:
        return {}
    seconds, stalls = ([push[name] for push in pushes] for name in ("seconds", "stall_seconds"))
    return {
        "push_p50_ms": 1e3 * percentile(seconds, 0.5),
        "push_p90_ms": 1e3 * percentile(seconds, 0.9),
        "stall_p50_ms": 1e3 * percentile(stalls, 0.5),
        "stall_max_ms": 1e3 * max(stalls),
    }


def mismatch_of(steps: Lines) -> dict[str, float]:
    """Mean over the steps of the mean |behaviour - trainer| logprob, nats."""
    found = [step["logprob_diff_mean"] for step in steps if step.get("logprob_diff_mean") is not None]
    return {"logprob_diff_mean": statistics.fmean(found)} if found else {}


def medians(rows: dict[str, Lines]) -> dict[str, Any]:
    """min, median and max of each figure and mode over the rounds, and async over sync pair by pair."""
    measured = {mode: runs for mode, runs in rows.items() if runs}
    found: dict[str, Any] = {
        mode: {name: spread([run[name] for run in runs], digits=6) for name in runs[0]}
        for mode, runs in measured.items()
    }
    if {"sync", "async"} <= set(measured):
        pairs = zip(measured["async"], measured["sync"], strict=False)  # the last pair may be half done
        ratios = [one["samples_per_s"] / other["samples_per_s"] for one, other in pairs]
        found["async_over_sync"] = spread(ratios, digits=2)
    return found


def total(steps: Lines, name: str) -> float:
    return sum(step[name] for step in steps)


def lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]
