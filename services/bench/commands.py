"""`offbeat bench`: the commands and their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench_app = typer.Typer(help="Measure, each figure beside its bare baseline.", no_args_is_help=True)
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
Overrides = Annotated[list[str] | None, typer.Argument(help="settings of the recipe, e.g. rollout.enforce_eager=true")]
Out = Annotated[Path | None, typer.Option(help="file for the JSON")]
Rounds = Annotated[int, typer.Option(help="measured rounds, after a warm-up")]


@bench_app.command("demo", context_settings=OVERRIDES)
def bench_demo(overrides: Overrides = None, out: Out = None) -> None:
    """The demo beside a bare single-process loop."""
    from services.bench.demo import bench_demo as bench

    _leave(bench(overrides or [], out=out))


@bench_app.command("loop", context_settings=OVERRIDES)
def bench_loop(
    overrides: Overrides = None, recipe: str = "demo", steps: int = 110, rounds: Rounds = 3, out: Out = None
) -> None:
    """The whole loop, asynchronous against synchronous."""
    from services.bench.loop import bench_loop as bench

    _leave(bench(recipe, overrides or [], steps=steps, rounds=rounds, out=out))


@bench_app.command("rollout")
def bench_rollout(rounds: Rounds = 5, threads: int = 1, out: Out = None) -> None:
    """The hf engine against transformers' own generate."""
    from services.bench.rollout import bench_rollout as bench

    _leave(bench(rounds=rounds, threads=threads, out=out))


@bench_app.command("stream")
def bench_stream(rounds: Rounds = 3, out: Out = None) -> None:
    """Trajectories a second over a gRPC stream."""
    from services.bench.stream import bench_stream as bench

    _leave(bench(rounds=rounds, out=out))


def _leave(code: int) -> None:
    if code:
        raise typer.Exit(code)
