"""The one door: `offbeat COMMAND`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from services.bench.commands import bench_app

app = typer.Typer(
    name="offbeat",
    help="Asynchronous reinforcement learning of language models, as independent services that talk gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Prepare and check data.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")

ROOMS = ("protos", "services", "trainer", "rollout", "reward")
ENVIRONMENT = {
    "TQDM_DISABLE": "1",
    "GRPC_VERBOSITY": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
"""No progress bars and notes of libraries between our own lines; idle threads do not spin on the cores that other
services need; our child processes exec at once, so gRPC need not stop its threads for a fork. A user's own setting
wins."""
Overrides = Annotated[
    list[str] | None, typer.Argument(help="settings, e.g. run.num_steps=10 trainer.optimizer.lr=1e-5")
]
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=OVERRIDES)
def demo(
    overrides: Overrides = None,
    engine: Annotated[str | None, typer.Option(help="hf, vllm or sglang; default: as the recipe says")] = None,
    fresh: Annotated[bool, typer.Option(help="forget an earlier demo")] = True,
) -> None:
    """Train a small model on this machine's CPU until its reward has visibly risen."""
    from services.commands.demo import run_demo

    leave(run_demo(overrides or [], engine=engine, fresh=fresh))


@app.command(context_settings=OVERRIDES)
def train(
    recipe: Annotated[str, typer.Argument(help="a recipe of deploy/recipes or a YAML file")],
    overrides: Overrides = None,
    inline: Annotated[bool, typer.Option(help="all actors in this process, for a debugger")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="print the resolved config and stop")] = False,
    check: Annotated[bool, typer.Option("--check", help="check the config and stop")] = False,
    fresh: Annotated[bool, typer.Option(help="delete an earlier run of this name first")] = False,
    plain: Annotated[bool, typer.Option(help="log lines instead of the live view")] = False,
) -> None:
    """Run all services of a recipe on this box."""
    config = load(recipe, overrides)
    if print_config:
        import yaml

        typer.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), nl=False)
    elif check:
        typer.echo(f"{recipe}: fine")
    else:
        from services.launch import run_training

        leave(run_training(config, inline=inline, fresh=fresh, plain=plain))


@app.command(context_settings=OVERRIDES)
def sft(
    recipe: Annotated[str, typer.Argument(help="a recipe of deploy/recipes or a YAML file, with a section sft")],
    overrides: Overrides = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="print the resolved config and stop")] = False,
    check: Annotated[bool, typer.Option("--check", help="check the config and stop")] = False,
    fresh: Annotated[bool, typer.Option(help="delete an earlier run of this name first")] = False,
) -> None:
    """Supervised training on prompts and responses, with the trainer's core: a start for reinforcement learning."""
    config = load(recipe, overrides, supervised=True)
    if print_config:
        import yaml

        typer.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), nl=False)
    elif check:
        typer.echo(f"{recipe}: fine")
    else:
        from services.supervised.command import run_sft

        leave(run_sft(config, fresh=fresh))


@app.command(context_settings=OVERRIDES)
def check(recipe: str, overrides: Overrides = None) -> None:
    """Check a recipe: keys, types, arithmetic, files."""
    load(recipe, overrides, supervised=None)
    typer.echo(f"{recipe}: fine")


@app.command(context_settings=OVERRIDES)
def serve(
    role: Annotated[str, typer.Argument(help="conductor, rollout, reward, reference or trainer")],
    overrides: Overrides = None,
    join: Annotated[str | None, typer.Option(help="HOST:PORT of the conductor")] = None,
    config: Annotated[str | None, typer.Option(help="recipe (conductor; others ask the conductor)")] = None,
    name: Annotated[str | None, typer.Option(help="unique in the run; default: the role and the process id")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 0,
    advertise: Annotated[str | None, typer.Option(help="host under which others reach this one")] = None,
    folder: Annotated[Path | None, typer.Option(help="run folder on this machine")] = None,
    insecure: Annotated[bool, typer.Option("--insecure-i-know", help="listen on a network without encryption")] = False,
    log_level: str = "INFO",
) -> None:
    """Run one service on this machine, in a running or starting run."""
    from services.serve import Place, serve_role

    place = Place(
        name=name or f"{role}-{os.getpid()}",
        host=host,
        port=port,
        advertise=advertise,
        folder=folder,
        insecure=insecure,
    )
    leave(serve_role(role, place, join=join, recipe=config, overrides=overrides or [], log_level=log_level))


@app.command()
def status(
    run: Annotated[str, typer.Argument(help="run folder or HOST:PORT of the conductor")] = "outputs/demo",
) -> None:
    """Say where a run stands."""
    from services.commands.live import print_status

    leave(print_status(run))


@app.command("eval", context_settings=OVERRIDES)
def evaluate(
    model: Annotated[str, typer.Option(help="Hugging Face folder or hub id, checkpoint, or run folder (its newest)")],
    overrides: Overrides = None,
    recipe: Annotated[str | None, typer.Option(help="names data and reward; default: the run's own, or demo")] = None,
    data: Annotated[Path | None, typer.Option(help="parquet or JSONL file in place of the recipe's data")] = None,
    reward: Annotated[str | None, typer.Option(help="reward function in place of the recipe's")] = None,
    engine: Annotated[str | None, typer.Option(help="hf, vllm or sglang; default: as the recipe says")] = None,
    split: Annotated[str, typer.Option(help="train or test")] = "test",
    num_prompts: Annotated[int, typer.Option(help="prompts at most; 0: all")] = 0,
    samples_per_prompt: Annotated[int | None, typer.Option(help="default: the largest k")] = None,
    k: Annotated[str, typer.Option(help="pass@k and maj@k for each of these, e.g. 1,4,8")] = "1",
    temperature: Annotated[float | None, typer.Option(help="default: 0 for one sample, else the recipe's")] = None,
    top_p: Annotated[float | None, typer.Option(help="default: the recipe's")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="response tokens at most; default: the recipe's")] = None,
    threshold: Annotated[float | None, typer.Option(help="reward from which on a response is correct")] = None,
    seed: Annotated[int, typer.Option(help="of the samples")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSONL file with every sample")] = None,
    summary: Annotated[Path | None, typer.Option(help="JSON file with what is printed")] = None,
) -> None:
    """pass@1, pass@k and majority vote of a model on the data of a recipe, or on any data file with a reward."""
    from services.commands.evaluate import Asked, run_evaluation

    asked = Asked(
        model=model,
        recipe=recipe,
        data=data,
        reward=reward,
        engine=engine,
        split=split,
        num_prompts=num_prompts,
        samples_per_prompt=samples_per_prompt,
        k=k,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        threshold=threshold,
        seed=seed,
    )
    leave(run_evaluation(asked, overrides=overrides or [], out=out, summary=summary))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="run folder or checkpoint")],
    out: Annotated[Path, typer.Argument(help="folder to write")],
    adapter: Annotated[bool, typer.Option("--adapter", help="of a LoRA run: the adapter alone, for PEFT")] = False,
) -> None:
    """Write the newest whole checkpoint as a folder that AutoModelForCausalLM and vLLM load."""
    from services.commands.export import export_model

    leave(export_model(source, out, adapter=adapter))


@app.command("make-model", context_settings=OVERRIDES)
def make_model(recipe: str, overrides: Overrides = None) -> None:
    """Make the small models that a recipe asks for, before services are started one by one."""
    from services.commands.tiny import make_models

    leave(make_models(load(recipe, overrides)))


@app.command("make-shape")
def make_shape(
    name: Annotated[str, typer.Argument(help="qwen3-0.6b, qwen3-1.7b, qwen3-4b or tiny")],
    out: Annotated[Path, typer.Argument(help="folder to write; one that holds a model stays")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="of the random weights")] = 0,
) -> None:
    """Make a model of a real size with random weights and a tokenizer of words, for benches."""
    from services.commands.tiny import make_bench_model

    leave(make_bench_model(name, out, dtype=dtype, seed=seed))


@data_app.command()
def gsm8k(
    source: Annotated[Path, typer.Option("--from", help="folder with train.jsonl and test.jsonl")],
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("data/gsm8k"),
) -> None:
    """Convert the GSM8K files to parquet, with a report."""
    from services.commands.data import convert_gsm8k

    leave(convert_gsm8k(source, out))


def load(recipe: str, overrides: list[str] | None, *, supervised: bool | None = False):  # type: ignore[no-untyped-def]
    """The checked config; all mistakes are printed at once, exit code 2. supervised: of offbeat sft; None: as it is."""
    from services.compose import load_config
    from services.errors import ConfigError
    from services.supervised.compose import is_supervised, load_sft_config

    try:
        if supervised is None:
            supervised = is_supervised(recipe)
        return (load_sft_config if supervised else load_config)(recipe, overrides or [])
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(problem, err=True)
        typer.echo(f"{len(error.problems)} problem{'s' * (len(error.problems) != 1)}; nothing was started", err=True)
        raise typer.Exit(2) from None


def leave(code: int) -> None:
    if code:
        raise typer.Exit(code)


def check_rooms() -> None:
    """A user's own trainer.py or reward/ in the way would be imported in place of a room: say so at once."""
    home = Path(__file__).resolve().parent.parent
    for room in ROOMS:
        for entry in map(Path, filter(None, sys.path)):
            candidates = (entry / room / "__init__.py", entry / f"{room}.py")
            found = next((path for path in candidates if path.is_file()), None)
            if found is not None:
                if home not in found.resolve().parents:
                    sys.exit(f"{found} stands in the way of Offbeat's own {room}: rename it or start elsewhere")
                break


def main() -> None:
    """Entry point of the console script."""
    if sys.path and sys.path[0] in ("", os.getcwd()) and os.getcwd() != str(Path(__file__).resolve().parent.parent):
        sys.path.pop(0)
    check_rooms()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    app()


if __name__ == "__main__":
    main()
