"""Tokens a second through the rollout service, as users start it, beside the bare engine on the same prompts.

The bare engine runs first, in a process that is gone when the service starts on the same card. Then leases go out as a
conductor grants them, and the clock runs from the first lease to the last trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.bench.bare.job import Baseline
from services.bench.bed import clean_folder, shape_settings, told
from services.bench.load import Load
from services.bench.report import keep, spread, write
from services.bench.stand_in import rollout_service
from services.commands.lineup import rollout_posts
from services.commands.placement import placement, visible_gpus
from services.compose import load_config
from services.errors import OffbeatError
from services.serve import save_config

if TYPE_CHECKING:
    from services.config import Config

ROUND_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWork:
    """What is measured. Units: samples, tokens."""

    engine: str
    shape: str
    samples: int
    group_size: int
    prompt_tokens: int
    response_tokens: int
    rounds: int
    bare: bool
    """Whether the baseline runs; without it there is no ratio."""


@told
def bench_rollout(work: RolloutWork, overrides: list[str], *, folder: Path, out: Path | None) -> int:
    """Measure both and write the medians and their ratio; the JSON is there after each part."""
    import uvloop

    config = config_of(work, overrides, folder)
    run = clean_folder(config.run_folder)
    save_config(config, run)
    card = placement(config, visible_gpus()).get("rollout-0")
    figures: dict[str, Any] = {"work": {name: getattr(work, name) for name in work.__slots__}, "overrides": overrides}
    if work.bare:
        figures["bare"] = of_bare(config, run, work=work, gpus=card)
        keep(out, "rollout", figures)
    figures["service"] = uvloop.run(of_service(config, run, work=work, gpus=card))
    ours = figures["service"]["tokens_per_s"]["median"]
    for way, bare in figures.get("bare", {}).get("tokens_per_s", {}).items():
        figures[f"service_over_bare_{way}"] = round(ours / bare["median"], 4)
    return write(out, "rollout", figures)


def config_of(work: RolloutWork, overrides: list[str], folder: Path) -> Config:
    """The recipe of benches with this work; later overrides win."""
    prompts = work.samples // work.group_size
    settings = [
        *shape_settings(work.shape, folder, dtype="float32" if work.engine == "hf" else "bfloat16"),
        "run.name=rollout",
        f"run.folder={folder}",
        f"run.prompts_per_step={prompts}",
        f"run.group_size={work.group_size}",
        f"data.size={prompts * (work.rounds + 1)}",
        f"data.prompt_tokens={work.prompt_tokens}",
        f"rollout.engine={work.engine}",
        f"rollout.max_num_seqs={work.samples}",
        f"rollout.max_model_len={work.prompt_tokens + work.response_tokens}",
        f"rollout.sampling.max_tokens={work.response_tokens}",
    ]
    return load_config("bench_loop", [*settings, *overrides])


def of_bare(config: Config, run: Path, *, work: RolloutWork, gpus: str | None) -> dict[str, Any]:
    """The engine alone, with the settings of the run."""
    post = next(rollout_posts(config))
    job = {"config": str(run / "config.yaml"), "rounds": work.rounds}
    bare = Baseline(work.engine, job, folder=run, gpus=gpus, threads=post.threads, python=post.python)
    try:
        answer = bare.answer()
    except OffbeatError as error:  # the service is measured all the same
        return {"problem": str(error)}
    rates = {way: spread(values, digits=0) for way, values in answer["tokens_per_s"].items()}
    return {"tokens_per_s": rates, "start_seconds": round(answer["start_seconds"], 1), "version": answer["version"]}


async def of_service(config: Config, run: Path, *, work: RolloutWork, gpus: str | None) -> dict[str, Any]:
    """The service, round by round after a warm-up."""
    rates = []
    async with rollout_service(config, run, gpus=gpus) as member:
        load = Load(config, run)
        try:
            await load.connect(member)
            for _ in range(work.rounds + 1):
                seconds, tokens = await load.round(work.samples, seconds=ROUND_SECONDS)
                if tokens != work.samples * work.response_tokens:
                    raise OffbeatError(f"{tokens} tokens came, not {work.samples} x {work.response_tokens}")
                rates.append(tokens / seconds)
        finally:
            await load.close()
    return {"tokens_per_s": spread(rates[1:], digits=0), "capabilities": list(member.identity.capabilities)}
