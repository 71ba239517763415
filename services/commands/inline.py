"""`offbeat train --inline`: every actor in one process and on one loop, for a debugger. The wire is the same."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from services.actor import Actor, Bind, cancel, run_process
from services.commands.lineup import lineup
from services.conductor import Conductor
from services.config import Config
from services.errors import ConfigError
from services.serve import ADDRESS_FILE, service_class
from services.telemetry import set_up_logging


def run_inline(config: Config, folder: Path) -> None:
    """Run to the end in this process; the first actor that fails ends all. ConfigError where it would take several."""
    foreign = sorted({post.python for post in lineup(config)} - {sys.executable})
    if config.launch.trainer_ranks > 1:
        raise ConfigError([f"--inline runs all in one process; launch.trainer_ranks={config.launch.trainer_ranks}"])
    if foreign:
        raise ConfigError([f"--inline runs all services in this Python; {foreign[0]} would have to run some of them"])
    set_up_logging("inline", folder=folder)
    run_process(run_all(config, folder))


async def run_all(config: Config, folder: Path) -> None:
    """The conductor first, then everybody who joins it; returns when the conductor has ended."""
    conductor = Conductor(Bind(name="conductor", port=config.launch.conductor_port), config, folder=folder)
    conducting = asyncio.create_task(conductor.run(), name="conductor")
    while not conductor.address and not conducting.done():
        await asyncio.sleep(0.01)
    (folder / ADDRESS_FILE).write_text(conductor.address + "\n")
    actors: list[Actor] = [
        service_class(post.role)(
            Bind(name=post.name), conductor=conductor.address, config=config, folder=folder, overrides=post.overrides
        )
        for post in lineup(config)
        if post.role != "conductor"
    ]
    others = [asyncio.create_task(actor.run(), name=actor.name) for actor in actors]
    try:
        pending: set[asyncio.Task[None]] = {conducting, *others}
        while not conducting.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await asyncio.wait(others, timeout=10.0)
    finally:
        await cancel(conducting, *others)
