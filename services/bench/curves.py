"""The demo trained by one algorithm after the other: six reward curves in one figure."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.bench.bed import told
from services.bench.drawing import draw
from services.bench.report import keep, spread, write
from services.compose import load_config
from services.config import Config
from services.errors import OffbeatError
from services.launch import prepare_folder, run_processes

CURVES: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "rloo": ("trainer.algorithm.adv_estimator=rloo",),
    "reinforce_plus_plus": ("trainer.algorithm.adv_estimator=reinforce_plus_plus",),
    "gae": (
        "trainer.algorithm.adv_estimator=gae",
        "trainer.critic.optimizer.lr=0.001",
        "trainer.critic.optimizer.weight_decay=0",
    ),
    "gspo": ("trainer.algorithm.loss=gspo", "trainer.algorithm.loss_aggregation=seq-mean-token-mean"),
    "cispo": ("trainer.algorithm.loss=cispo", "trainer.algorithm.clip_low=1.0"),
}
"""name -> how it differs from the recipe, which is grpo with the clipped loss."""
LAST = 20
"""Steps at the end whose rewards are printed; the file has all."""


@told
def bench_curves(names: Sequence[str], overrides: Sequence[str], *, steps: int, folder: Path, out: Path) -> int:
    """Train from one start model, each in a run of its own; JSON and figure lie there after each. 1: one failed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OffbeatError("the figure is drawn by matplotlib: pip install 'offbeat[figures]'")
    model = folder / "models" / "start-curves"
    shutil.rmtree(model, ignore_errors=True)
    for name in names:
        config_of(name, overrides, steps=steps, folder=folder, model=model)  # all mistakes before the first run
    measured: dict[str, dict[str, Any]] = {}
    figures: dict[str, Any] = {"steps": steps, "overrides": list(overrides), "curves": measured, "problems": []}
    for name in names:
        config = config_of(name, overrides, steps=steps, folder=folder, model=model)
        try:
            measured[name] = {"settings": CURVES[name], **one_curve(config, model)}
        except OffbeatError as error:  # the others are trained all the same
            figures["problems"].append(f"{name}: {error}")
        else:
            draw({done: curve["reward_mean"] for done, curve in measured.items()}, out.with_suffix(".svg"))
        keep(out, "curves", figures)
    ends = {name: {**curve, "reward_mean": spread(curve["reward_mean"][-LAST:])} for name, curve in measured.items()}
    write(None, "curves", {**figures, "curves": ends})
    return 1 if figures["problems"] else 0


def config_of(name: str, overrides: Sequence[str], *, steps: int, folder: Path, model: Path) -> Config:
    """The demo with this algorithm; the model is made once and used again."""
    made = [f"model={model}", "tiny=null"] if (model / "config.json").is_file() else []
    run = [f"run.num_steps={steps}", f"run.folder={folder}", f"run.name=curve-{name}"]
    return load_config("demo", ["evaluation.every_steps=0", *CURVES[name], *overrides, *made, *run])


def one_curve(config: Config, model: Path) -> dict[str, Any]:
    """One run from the start model: the mean reward of each step, and what the run took."""
    run = prepare_folder(config, fresh=True)
    if config.tiny is not None:
        shutil.copytree(config.trainer.model, model)
    began = time.monotonic()
    run_processes(config, run, plain=False)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = {row["step"]: row["reward_mean"] for row in rows}  # a step that was done again counts once
    if sorted(rewards) != list(range(1, config.run.num_steps + 1)):
        raise OffbeatError(f"the run has {len(rewards)} of {config.run.num_steps} steps")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "reward_mean": [round(rewards[step], 4) for step in sorted(rewards)],
    }
