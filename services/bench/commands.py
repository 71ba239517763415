"""`offbeat bench`: the commands and their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.bench.bed import FOLDER

bench_app = typer.Typer(help="Measure, each figure beside its bare baseline.", no_args_is_help=True)
ENGINES = ("hf", "vllm", "sglang")
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
Overrides = Annotated[list[str] | None, typer.Argument(help="settings of the recipe, e.g. rollout.threads=1")]
Out = Annotated[Path | None, typer.Option(help="file for the JSON, written after each part")]
Rounds = Annotated[int, typer.Option(help="measured rounds, after a warm-up")]
Folder = Annotated[Path, typer.Option(help="where models (kept) and runs (made anew) lie")]
Engine = Annotated[str, typer.Option(help="hf, vllm or sglang")]
ShapeName = Annotated[str, typer.Option(help="model made on the spot: qwen3-0.6b, qwen3-1.7b, qwen3-4b or tiny")]
Bare = Annotated[bool, typer.Option(help="measure the baselines too")]


@bench_app.command("demo", context_settings=OVERRIDES)
def bench_demo(overrides: Overrides = None, out: Out = None) -> None:
    """The demo beside a bare single-process loop."""
    from services.bench.demo import bench_demo as bench

    _leave(bench(overrides or [], out=out))


@bench_app.command("loop", context_settings=OVERRIDES)
def bench_loop(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="a recipe of deploy/recipes or a YAML file")] = "demo",
    shape: Annotated[
        str, typer.Option(help="model made on the spot in place of the recipe's; empty: the recipe's")
    ] = "",
    modes: Annotated[
        str, typer.Option(help="sync (max_staleness 0) and async (2), in the order of running")
    ] = "sync,async",
    steps: Annotated[int, typer.Option(help="optimizer steps of a run")] = 110,
    warm_steps: Annotated[int, typer.Option(help="first steps that are not counted")] = 10,
    rounds: Rounds = 3,
    folder: Folder = FOLDER,
    out: Out = None,
) -> None:
    """The whole loop, asynchronous against synchronous."""
    from services.bench.loop import MODES, LoopWork
    from services.bench.loop import bench_loop as bench

    chosen = tuple(modes.split(","))
    if not set(chosen) <= set(MODES):
        raise typer.BadParameter(f"--modes {modes}: there are {', '.join(MODES)}")
    if not 0 <= warm_steps < steps:
        raise typer.BadParameter(f"--warm-steps {warm_steps} leaves nothing of --steps {steps}")
    work = LoopWork(recipe=recipe, shape=shape, modes=chosen, steps=steps, warm_steps=warm_steps, rounds=rounds)
    _leave(bench(work, overrides or [], folder=folder, out=out))


@bench_app.command("rollout", context_settings=OVERRIDES)
def bench_rollout(
    overrides: Overrides = None,
    engine: Engine = "hf",
    shape: Annotated[str, typer.Option(help="model made on the spot; hf without one: the engine alone, tiny")] = "",
    samples: Annotated[int, typer.Option(help="samples of a round, all leased at once")] = 512,
    group_size: Annotated[int, typer.Option(help="samples of each prompt")] = 8,
    prompt_tokens: int = 128,
    response_tokens: int = 256,
    rounds: Rounds = 3,
    threads: Annotated[int, typer.Option(help="of the engine alone")] = 1,
    bare: Bare = True,
    folder: Folder = FOLDER,
    out: Out = None,
) -> None:
    """Tokens a second through the rollout service, beside the bare engine."""
    if engine == "hf" and not shape:
        from services.bench.generate import bench_generate

        _leave(bench_generate(rounds=rounds, threads=threads, out=out))
        return
    from services.bench.rollout import RolloutWork
    from services.bench.rollout import bench_rollout as bench

    _check_engine(engine)
    if samples % group_size:
        raise typer.BadParameter(f"--samples {samples} is no multiple of --group-size {group_size}")
    work = RolloutWork(
        engine=engine,
        shape=shape or "qwen3-0.6b",
        samples=samples,
        group_size=group_size,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        rounds=rounds,
        bare=bare,
    )
    _leave(bench(work, overrides or [], folder=folder, out=out))


@bench_app.command("push", context_settings=OVERRIDES)
def bench_push(
    overrides: Overrides = None,
    engine: Engine = "vllm",
    shape: ShapeName = "qwen3-0.6b",
    rounds: Annotated[int, typer.Option(help="pushes of each half, after two to warm up")] = 20,
    decoding: Annotated[int, typer.Option(help="samples in flight in the second half; 0 leaves it out")] = 256,
    response_tokens: Annotated[int, typer.Option(help="of the samples in flight")] = 512,
    pause_seconds: Annotated[float, typer.Option(help="between two pushes while decoding goes on")] = 0.2,
    bare: Bare = True,
    folder: Folder = FOLDER,
    out: Out = None,
) -> None:
    """A push from begin to commit, idle and while decoding, beside a raw broadcast."""
    _check_engine(engine)
    from services.bench.push import PushWork
    from services.bench.push import bench_push as bench

    work = PushWork(
        engine=engine,
        shape=shape,
        rounds=rounds,
        decoding=decoding,
        response_tokens=response_tokens,
        pause_seconds=pause_seconds,
        bare=bare,
    )
    _leave(bench(work, overrides or [], folder=folder, out=out))


@bench_app.command("stream")
def bench_stream(rounds: Rounds = 3, out: Out = None) -> None:
    """Trajectories a second over a gRPC stream."""
    from services.bench.stream import bench_stream as bench

    _leave(bench(rounds=rounds, out=out))


@bench_app.command("train", context_settings=OVERRIDES)
def bench_train(
    overrides: Overrides = None,
    shape: ShapeName = "qwen3-0.6b",
    sequence: Annotated[int, typer.Option(help="tokens of a sample; one sample is one micro-batch")] = 8192,
    prompt_tokens: Annotated[int, typer.Option(help="of these, without loss")] = 1024,
    micro_batches: Annotated[int, typer.Option(help="samples of each GPU in a step")] = 4,
    steps: Annotated[int, typer.Option(help="optimizer steps that are timed")] = 3,
    warm_steps: Annotated[int, typer.Option(help="before them, not timed")] = 2,
    rounds: Annotated[int, typer.Option(help="times that all rows run, in turn")] = 1,
    gpus: Annotated[str, typer.Option(help="numbers of GPUs, e.g. 1,2,4; on a box without: of CPU processes")] = "1",
    rows: Annotated[
        str, typer.Option(help="what runs, in turn: ours, ours+proximal, bare, bare+compile, bare+cudnn, ...")
    ] = "ours,ours+proximal,bare,bare+compile",
    peak_tflops: Annotated[float, typer.Option(help="dense bfloat16 peak of one GPU, for the MFU")] = 990.0,
    profile: Annotated[Path | None, typer.Option(help="text file for the longest kernels of one step of each")] = None,
    folder: Folder = FOLDER,
    out: Out = None,
) -> None:
    """The trainer's step, beside a bare FSDP2 loop on the same tokens."""
    from services.bench.train import TrainWork
    from services.bench.train import bench_train as bench
    from services.bench.train_rows import row_of

    if not 0 < prompt_tokens < sequence:
        raise typer.BadParameter(f"--prompt-tokens {prompt_tokens} leaves nothing of --sequence {sequence}")
    if not all(count.isdigit() and int(count) for count in gpus.split(",")):
        raise typer.BadParameter(f"--gpus {gpus}: numbers from 1 on, with commas")
    try:
        chosen = tuple(row_of(name) for name in rows.split(","))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    work = TrainWork(
        shape=shape,
        sequence=sequence,
        prompt_tokens=prompt_tokens,
        micro_batches=micro_batches,
        steps=steps,
        warm_steps=warm_steps,
        rounds=rounds,
        gpus=tuple(map(int, gpus.split(","))),
        rows=chosen,
        peak_tflops=peak_tflops,
    )
    _leave(bench(work, overrides or [], folder=folder, profile=profile, out=out))


@bench_app.command("logprobs")
def bench_logprobs(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu")] = "cuda",
    tokens: int = 32_768,
    vocabulary: int = 151_936,
    hidden: Annotated[int, typer.Option(help="size of a hidden state")] = 1024,
    dtype: Annotated[str, typer.Option(help="of hidden states and head: bfloat16 or float32")] = "bfloat16",
    max_logits_mib: Annotated[int, typer.Option(help="float32 logits of a block")] = 256,
    entropy: Annotated[bool, typer.Option(help="with the entropy and its gradient")] = True,
    ways: Annotated[str, typer.Option(help="in the order of running")] = "plain,eager,compiled",
    rounds: Rounds = 3,
    out: Out = None,
) -> None:
    """Logprobs of target tokens, forward and backward: from all logits at once, in blocks, in compiled blocks."""
    from services.bench.logprobs import WAYS, LogprobsWork
    from services.bench.logprobs import bench_logprobs as bench

    chosen = tuple(ways.split(","))
    if not set(chosen) <= set(WAYS):
        raise typer.BadParameter(f"--ways {ways}: there are {', '.join(WAYS)}")
    if dtype not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype {dtype}: there are bfloat16, float32")
    work = LogprobsWork(
        device=device,
        tokens=tokens,
        vocabulary=vocabulary,
        hidden=hidden,
        dtype=dtype,
        max_logits_mib=max_logits_mib,
        entropy=entropy,
        ways=chosen,
        rounds=rounds,
    )
    _leave(bench(work, out=out))


@bench_app.command("curves", context_settings=OVERRIDES)
def bench_curves(
    overrides: Overrides = None,
    names: Annotated[str, typer.Option(help="algorithms, in the order of running; empty: all")] = "",
    steps: Annotated[int, typer.Option(help="optimizer steps of each run")] = 300,
    folder: Folder = FOLDER,
    out: Annotated[Path, typer.Option(help="the rewards as JSON; the figure lies beside it as .svg")] = Path(
        "docs/benchmarks/curves.json"
    ),
) -> None:
    """The demo trained by one algorithm after the other, their reward curves in one figure."""
    from services.bench.curves import CURVES
    from services.bench.curves import bench_curves as bench

    chosen = names.split(",") if names else list(CURVES)
    if unknown := [name for name in chosen if name not in CURVES]:
        raise typer.BadParameter(f"--names {unknown[0]}: there are {', '.join(CURVES)}")
    _leave(bench(chosen, overrides or [], steps=steps, folder=folder, out=out))


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise typer.BadParameter(f"--engine {engine}: there are {', '.join(ENGINES)}")


def _leave(code: int) -> None:
    if code:
        raise typer.Exit(code)
