"""`offbeat sft`: supervised training on prompts and responses, in this process or on several ranks.

one rank         this process is it
several ranks    this process starts torchrun around the same command and waits; under torchrun each process is a rank
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from services.commands.placement import visible_gpus
from services.errors import Broken, ConfigError, OffbeatError
from services.launch import environment
from services.serve import BROKEN, save_config
from services.supervised.config import SftConfig
from services.telemetry import set_up_logging

logger = logging.getLogger(__name__)


def run_sft(config: SftConfig, *, fresh: bool = False) -> int:
    """Train to the end; the exit code. The last line printed is the summary as JSON."""
    leads, in_torchrun = os.environ.get("RANK", "0") == "0", "RANK" in os.environ
    try:
        folder = prepare(config, fresh=fresh) if leads else config.run_folder
        if config.launch.trainer_ranks > 1 and not in_torchrun:
            return start_ranks(config, folder)
        train(config, folder)
    except ConfigError as error:
        return told(error, 2, leads=leads)
    except OffbeatError as error:
        return told(error, 1, leads=leads)
    except Exception as error:
        logger.exception("the run broke")
        return told(Broken(f"the run broke: {type(error).__name__}: {error}"), BROKEN, leads=leads)
    return 0


def told(error: OffbeatError, code: int, *, leads: bool) -> int:
    """All ranks end by the same error, and one says so."""
    if leads:
        print(error, file=sys.stderr)
    return code


def prepare(config: SftConfig, *, fresh: bool) -> Path:
    """Make or find the run folder, save the config in it, make the start model."""
    from services.commands.tiny import make_model
    from services.supervised.rows import check_data

    folder = config.run_folder
    check_gpus(config, visible_gpus())
    check_data(config)
    if fresh and folder.exists():
        shutil.rmtree(folder)
    set_up_logging("sft", folder=folder)
    save_config(config, folder)
    if config.tiny is not None and not Path(config.trainer.model).exists():
        make_model(config.tiny, Path(config.trainer.model), config)
    return folder


def check_gpus(config: SftConfig, visible: Sequence[str]) -> None:
    """ConfigError where ranks would have to share a GPU."""
    ranks, on_gpus = config.launch.trainer_ranks, config.trainer.device in ("auto", "cuda")
    if on_gpus and visible and ranks > len(visible):
        raise ConfigError(
            [f"launch.trainer_ranks={ranks}: each takes a GPU of its own, and {len(visible)} are visible"]
        )


def start_ranks(config: SftConfig, folder: Path) -> int:
    """The same command on every rank, by torchrun; its exit code, when all have ended."""
    ranks = str(config.launch.trainer_ranks)
    command = [sys.executable, "-P", "-m", "services.ranks.torchrun", ranks, "sft", str(folder / "config.yaml")]
    variables = environment(config.trainer.threads, None)
    process = subprocess.Popen(command, env=variables, start_new_session=True)  # a Ctrl-C reaches it once, from here
    with signalled(lambda number: process.send_signal(signal.SIGTERM)):
        code = process.wait()
    if code not in (0, 1, 2):
        print(f"a rank died (exit code {code}), see {folder}/logs; the same command goes on", file=sys.stderr)
    return code


def train(config: SftConfig, folder: Path) -> None:
    """One rank, from its start to the last checkpoint."""
    import torch.distributed as dist

    from services.supervised.rows import sft_rows
    from services.supervised.run import SftRun
    from trainer.parallel.loading import load_trained
    from trainer.parallel.start import seat
    from trainer.supervised.step import SupervisedLearner

    if seat().rank:
        set_up_logging(f"sft.rank{seat().rank}", folder=folder, console=False)
    asked: list[int] = []
    with signalled(asked.append):
        try:
            model, ranks, _ = load_trained(config.trainer)
            learner = SupervisedLearner(model, config.trainer, ranks)
        except (ValueError, OSError) as error:
            raise ConfigError([f"trainer: {error}"]) from error
        run = SftRun(config, folder, learner, sft_rows(config))
        run.resume()
        run.run(lambda: bool(asked))
        if ranks.leads:
            print(json.dumps(run.write_summary()))
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def signalled(tell: Callable[[int], object]) -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C are told once; a second one acts as it always does."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: object) -> None:
        signal.signal(number, previous[signal.Signals(number)])
        tell(number)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
