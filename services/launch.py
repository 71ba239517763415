"""`offbeat train`: all services of a run on this box, as processes that are watched and started again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from services.commands.lineup import Post, check_interpreters, lineup
from services.commands.placement import VARIABLE, placement, visible_gpus
from services.config import Config
from services.errors import ConfigError, OffbeatError, RunStopped
from services.serve import ADDRESS_FILE, BROKEN, REPLACED, STOPPED, save_config
from services.telemetry import set_up_logging

if TYPE_CHECKING:
    from services.commands.live import LiveView

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1
GRACE_SECONDS = 15.0
LEFT = (0, REPLACED)
"""Exit codes of services that have left for good: drained, or replaced by one that somebody else has started."""
QUICK_SECONDS = 5.0
"""A service that dies sooner than this after its start is started again only after a pause."""


@dataclass(slots=True)
class Child:
    """One service process and how often it was started."""

    name: str
    role: str
    command: list[str]
    threads: int
    gpus: str | None
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    started_at: float = 0.0
    not_before: float = 0.0
    log: Path = field(default_factory=Path)


class Launcher:
    """Starts the services of a run and keeps them alive until the conductor is done."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.port = config.launch.conductor_port or free_port(config.launch.host)
        self.address = f"{config.launch.host}:{self.port}"
        self.restarts = 0
        self.gpus = placement(config, visible_gpus())
        self.children = [self._child(post) for post in lineup(config)]

    def _child(self, post: Post) -> Child:
        module = ["services.cli"] if post.ranks == 1 else ["services.ranks.torchrun", str(post.ranks)]
        command = [post.python, "-P", "-m", *module, "serve", post.role, "--name", post.name]
        command += ["--folder", str(self.folder), "--host", self.config.launch.host]
        if post.role == "conductor":
            command += ["--config", str(self.folder / "config.yaml"), "--port", str(self.port)]
        else:
            command += ["--join", self.address, *post.overrides]
        log = self.folder / "logs" / f"{post.name}.out"
        return Child(post.name, post.role, command, post.threads, self.gpus.get(post.name), log=log)

    def start(self) -> None:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        (self.folder / ADDRESS_FILE).write_text(self.address + "\n")
        for child in self.children:
            self._spawn(child)

    def _spawn(self, child: Child) -> None:
        variables = environment(child.threads, child.gpus)
        with child.log.open("ab") as output:
            child.process = subprocess.Popen(
                child.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables
            )
        child.starts += 1
        child.started_at = time.monotonic()

    def watch(self) -> bool:
        """One look at the children; True when the conductor has ended well. OffbeatError when a restart cannot help:
        RunStopped where a guard has ended the run."""
        for child in self.children:
            code = child.process.poll() if child.process is not None else None
            if code is None and child.process is not None:
                continue
            if child.role == "conductor" and code == 0:
                return True
            if child.role == "conductor" and code == STOPPED:
                raise RunStopped(json.loads((self.folder / "summary.json").read_text())["stopped"])
            if code not in LEFT:
                self._restart(child, code)
        return False

    def _restart(self, child: Child, code: int | None) -> None:
        now = time.monotonic()
        if child.process is not None:
            if code == 2 or (child.starts == 1 and code is not None and 0 < code != BROKEN):
                raise OffbeatError(f"{child.name} cannot start (exit code {code}):\n{tail(child.log)}")
            self.restarts += 1
            if self.restarts > self.config.launch.max_restarts:
                raise OffbeatError(
                    f"{child.name} died (exit code {code}), and the {self.restarts}th restart is one too many"
                )
            logger.warning("service died; starting it again", extra={"facts": {"name": child.name, "code": code}})
            child.process = None
            quick = now - child.started_at < QUICK_SECONDS
            child.not_before = now + (min(2.0**child.starts, 30.0) if quick else 0.0)
        if now >= child.not_before:
            self._spawn(child)

    def stop(self) -> None:
        """Drain what still runs; what does not leave in its grace is killed."""
        running = [
            child.process for child in self.children if child.process is not None and child.process.poll() is None
        ]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in running:
            try:
                process.wait(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def environment(threads: int, gpus: str | None) -> dict[str, str]:
    """Of a service with so many CPU threads (0: as its libraries like) that sees these GPUs (None: all)."""
    variables = {**os.environ, "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    if gpus is not None:
        variables[VARIABLE] = gpus
    return variables


def prepare_folder(config: Config, *, fresh: bool) -> Path:
    """Make or find the run folder, save the config in it, make the start model; OffbeatError for a finished run."""
    config.evaluation_prompts()
    config.prompts()  # data that cannot be used is told before anything starts, and an engine or a GPU that is nowhere
    check_interpreters(lineup(config))
    placement(config, visible_gpus())
    folder = config.run_folder
    if fresh and folder.exists():
        shutil.rmtree(folder)
    if (folder / "summary.json").exists() and json.loads((folder / "summary.json").read_text())[
        "steps"
    ] >= config.run.num_steps:
        raise OffbeatError(f"{folder} holds a finished run: choose another run.name, more run.num_steps, or --fresh")
    save_config(config, folder)
    if not all(made.exists() for _, made in config.models_to_make()):
        command = [sys.executable, "-P", "-m", "services.cli", "make-model", str(folder / "config.yaml")]
        if subprocess.run(command, check=False).returncode:
            raise OffbeatError("a model that the run begins with could not be made")
    return folder


def run_training(config: Config, *, inline: bool = False, fresh: bool = False, plain: bool = False) -> int:
    """Run to the end; returns the exit code."""
    try:
        folder = prepare_folder(config, fresh=fresh)
        if inline:
            from services.commands.inline import run_inline

            run_inline(config, folder)
        else:
            run_processes(config, folder, plain=plain)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OffbeatError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(json.loads((folder / "summary.json").read_text())))
    return 0


def run_processes(config: Config, folder: Path, *, plain: bool) -> None:
    """Start, watch and show until the conductor is done; SIGTERM and Ctrl-C drain."""
    from services.commands.live import LiveView

    set_up_logging("launch", folder=folder, console=plain)
    launcher = Launcher(config, folder)
    view = LiveView(launcher.address, plain=plain or not sys.stdout.isatty())
    stopping: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, frame: stopping.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    launcher.start()
    try:
        asyncio.run(watch(launcher, view, lambda: bool(stopping)))
    finally:
        launcher.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stopping:
        raise OffbeatError(f"stopped; the same command goes on with the run in {folder}")


async def watch(launcher: Launcher, view: LiveView, stopping: Callable[[], bool]) -> None:
    async with view:
        while not launcher.watch() and not stopping():
            await asyncio.sleep(POLL_SECONDS)


def free_port(host: str) -> int:
    """A port that is free now; the conductor keeps it over restarts, so that the others find it again."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def tail(path: Path, *, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""
