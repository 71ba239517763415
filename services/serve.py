"""`offbeat serve ROLE`: one service in this process."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from services.actor import Actor, Bind, run_process, run_until_signalled
from services.compose import load_config
from services.config import Config
from services.configs.launch import Section
from services.errors import Broken, ConfigError, OffbeatError, PeerError, Replaced, RunStopped
from services.telemetry import set_up_logging

ROLES = ("conductor", "rollout", "reward", "reference", "trainer")
ADDRESS_FILE = "conductor.address"
REPLACED, BROKEN, STOPPED = 3, 4, 5
EXIT_CODES: dict[type[Exception], int] = {Replaced: REPLACED, Broken: BROKEN, RunStopped: STOPPED}
"""Of a service that had joined the run, and STOPPED of the conductor; one that could not join exits with 1, one with a
wrong config with 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a service runs."""

    name: str
    host: str
    port: int
    advertise: str | None
    folder: Path | None
    insecure: bool

    def bind(self) -> Bind:
        return Bind(name=self.name, host=self.host, port=self.port, advertise=self.advertise)


def serve_role(
    role: str, place: Place, *, join: str | None, recipe: str | None, overrides: list[str], log_level: str
) -> int:
    """Run one service until it is drained; returns the exit code and says what went wrong in one line."""
    try:
        check_place(role, place, join=join, recipe=recipe)
        rank = int(os.environ.get("RANK", "0")) if role == "trainer" else 0
        if rank:
            return follow_rank_0(place, rank=rank, log_level=log_level)
        config = load_config(recipe, overrides) if recipe is not None else None
        folder = place.folder or (config.run_folder if config is not None else None)
        set_up_logging(place.name, folder=folder, level=log_level)
        own = overrides if config is None else []
        run_process(live(role, place, config=config, folder=folder, join=join or "", overrides=own))
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except (OffbeatError, PeerError) as error:
        print(f"{place.name}: {error}", file=sys.stderr)
        return EXIT_CODES.get(type(error), 1)
    return 0


def follow_rank_0(place: Place, *, rank: int, log_level: str) -> int:
    """A trainer's rank is no service of its own. It ends when rank 0 says so; torchrun ends it when that dies."""
    from services.ranks.rank import follow
    from trainer.parallel.start import seat

    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 drains, and cannot without the others
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(f"{place.name}.rank{rank}", folder=place.folder, level=log_level)
    follow(seat())
    return 0


def check_place(role: str, place: Place, *, join: str | None, recipe: str | None) -> None:
    problems = []
    if role not in ROLES:
        problems.append(f"{role}: no such role; there are {', '.join(ROLES)}")
    if role == "conductor" and recipe is None:
        problems.append("a conductor needs --config RECIPE")
    if role in ROLES[1:] and join is None:
        problems.append(f"a {role} needs --join HOST:PORT of the conductor")
    if not is_loopback(place.host) and not place.insecure:
        problems.append(
            f"{place.host} can be reached from the network and the wire is not encrypted:"
            " put it behind a private network and say --insecure-i-know, or listen on 127.0.0.1"
        )
    if problems:
        raise ConfigError(problems)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def live(
    role: str, place: Place, *, config: Config | None, folder: Path | None, join: str, overrides: list[str]
) -> None:
    """Make the actor inside its loop, which its channels are bound to, and run it."""
    if role != "conductor":
        actor: Actor = service_class(role)(
            place.bind(), conductor=join, config=config, folder=folder, overrides=overrides
        )
    else:
        from services.conductor import Conductor

        assert config is not None and folder is not None
        save_config(config, folder)
        actor = Conductor(place.bind(), config, folder=folder)
    await run_until_signalled(actor)


def save_config(config: Section, folder: Path) -> None:
    """The resolved config, in the run folder; whole or not at all, for a restarted conductor reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / "config.yaml.tmp"
    scratch.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    scratch.replace(folder / "config.yaml")


def service_class(role: str):  # type: ignore[no-untyped-def]
    if role == "rollout":
        from services.rollout import RolloutService

        return RolloutService
    if role == "reward":
        from services.reward import RewardService

        return RewardService
    if role == "reference":
        from services.reference import ReferenceService

        return ReferenceService
    from services.trainer import TrainerService

    return TrainerService
