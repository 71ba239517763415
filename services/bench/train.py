"""The trainer's step beside a bare FSDP2 loop: tokens a second, share of the GPU's peak, and scaling over GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.bench.bare.job import Answer, Baseline, Job
from services.bench.bed import shape_settings, told
from services.bench.report import keep, write
from services.bench.train_figures import tables
from services.bench.train_rows import MODULES, Row
from services.commands.placement import visible_gpus
from services.compose import load_config
from services.errors import OffbeatError

if TYPE_CHECKING:
    from services.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWork:
    """What is measured. Units: tokens, samples of one GPU in a step, steps."""

    shape: str
    sequence: int
    prompt_tokens: int
    micro_batches: int
    steps: int
    warm_steps: int
    rounds: int
    gpus: tuple[int, ...]
    """Where the box has none: processes on its CPU."""
    rows: tuple[Row, ...]
    peak_tflops: float


@told
def bench_train(
    work: TrainWork, overrides: Sequence[str], *, folder: Path, profile: Path | None, out: Path | None
) -> int:
    """Run the rows in turn, each in processes of its own; the JSON is there after each. 1 where one of them failed."""
    cards = visible_gpus()
    if cards and max(work.gpus) > len(cards):
        raise OffbeatError(f"--gpus {max(work.gpus)}: this box shows {len(cards)}")
    configs = configs_of(work, overrides, folder=folder, on_gpu=bool(cards))
    model = json.loads((Path(configs[work.rows[0].name].trainer.model) / "config.json").read_text())
    answers: dict[int, dict[str, list[Answer]]] = {}
    figures: dict[str, Any] = {"work": said(work), "overrides": list(overrides), "gpus": {}, "problems": []}
    if profile is not None:
        profile.unlink(missing_ok=True)
    for again, ranks, row in product(range(work.rounds), work.gpus, work.rows):
        job = job_of(work, row, configs[row.name], ranks=ranks, profiled=profile is not None and not again)
        try:
            answer = one_row(row, job, folder=folder / "train", gpus=",".join(cards[:ranks]) if cards else None)
        except OffbeatError as error:  # the other rows are measured all the same
            figures["problems"].append(f"{row.name} on {ranks}: {error}")
        else:
            add_profile(profile, f"{row.name} on {ranks}", answer.pop("profile", ""))
            answers.setdefault(ranks, {}).setdefault(row.name, []).append(answer)
            peak = 1e12 * work.peak_tflops if cards else None
            tokens = work.micro_batches * work.sequence
            figures["gpus"] = tables(answers, tokens=tokens, model=model, sequence=work.sequence, peak=peak)
        keep(out, "train", figures)
    write(out, "train", figures)
    return 1 if figures["problems"] else 0


def configs_of(work: TrainWork, overrides: Sequence[str], *, folder: Path, on_gpu: bool) -> dict[str, Config]:
    """The settings of each row; all are checked before anything runs."""
    settings = [
        *shape_settings(work.shape, folder, dtype="bfloat16" if on_gpu else "float32"),
        "trainer.gradient_checkpointing=true",
        f"trainer.max_tokens_per_microbatch={work.sequence}",
        *overrides,
    ]
    return {row.name: load_config("bench_loop", [*settings, *row.settings]) for row in work.rows}


def said(work: TrainWork) -> dict[str, Any]:
    held = {name: getattr(work, name) for name in work.__slots__}
    return {**held, "rows": [row.name for row in work.rows]}


def job_of(work: TrainWork, row: Row, config: Config, *, ranks: int, profiled: bool) -> Job:
    """What one loop is told."""
    return {
        "ranks": ranks,
        "options": row.options,
        "model": config.trainer.model,
        "dtype": config.trainer.dtype,
        "trainer": config.trainer.model_dump(mode="json"),
        "micro_batches": work.micro_batches,
        "prompt_tokens": work.prompt_tokens,
        "response_tokens": work.sequence - work.prompt_tokens,
        "steps": work.steps,
        "warm_steps": work.warm_steps,
        "profile": profiled,
    }


def one_row(row: Row, job: Job, *, folder: Path, gpus: str | None) -> Answer:
    """Run one loop in processes of its own, so that each begins with empty memory."""
    package, module = MODULES[row.kind]
    threads, ranks = job["trainer"]["threads"], job["ranks"]
    loop = Baseline(module, job, folder=folder, gpus=gpus, threads=threads, ranks=ranks, package=package)
    return loop.answer()


def add_profile(file: Path | None, title: str, table: str) -> None:
    if file is not None and table:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as text:
            text.write(f"{title}\n{table}\n\n")
