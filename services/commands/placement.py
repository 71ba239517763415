"""Which GPUs of this box each service sees: as `launch.gpus` says, else the trainer first, then server by server.

A service is given its cards as CUDA_VISIBLE_DEVICES and calls the first of them cuda:0.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.errors import ConfigError

if TYPE_CHECKING:
    from rollout.config import RolloutConfig
    from services.config import Config

VARIABLE = "CUDA_VISIBLE_DEVICES"
LIST_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Seat:
    """A service that may want cards; `count` it takes in automatic placement."""

    role: str
    name: str
    count: int


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; nothing is initialised."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip() not in ("", "-1", "NoDevFiles"))
    return tuple(str(index) for index in range(count_gpus()))


def count_gpus() -> int:
    """GPUs of this box as its driver lists them, or by their device files."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=LIST_SECONDS, check=False)
        if done.returncode == 0:
            return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def placement(config: Config, visible: tuple[str, ...]) -> dict[str, str]:
    """Service name -> its CUDA_VISIBLE_DEVICES; a service that is not in it sees all. ConfigError where cards lack."""
    indices = dict(asked(config, len(visible))) if config.launch.gpus else automatic(config, len(visible))
    return {name: ",".join(visible[index] for index in cards) for name, cards in indices.items()}


def automatic(config: Config, available: int) -> dict[str, tuple[int, ...]]:
    """Cards in order: the trainer's, then each rollout server's; reference services look on with the trainer.

    Where they do not suffice all services share them, unless launch.trainer_ranks asks for more than there is.
    """
    wanted = [seat for seat in seats(config) if seat.count]
    if config.launch.share_gpu:
        return together(wanted, available)
    needed = sum(seat.count for seat in wanted)
    if needed > available:
        if available and config.launch.trainer_ranks > 1:
            shares = " + ".join(f"{seat.count} {seat.name}" for seat in wanted)
            raise ConfigError(
                [
                    f"launch.trainer_ranks={config.launch.trainer_ranks}: the run takes {needed} GPUs ({shares}) and"
                    f" this box has {available}: fewer launch.rollout_servers, or say in launch.gpus who shares a card"
                ]
            )
        return {}
    found, first = {}, 0
    for seat in wanted:
        found[seat.name] = tuple(range(first, first + seat.count))
        first += seat.count
    if "trainer" in found:
        found |= {seat.name: found["trainer"] for seat in seats(config) if seat.role == "reference"}
    return found


def together(wanted: list[Seat], available: int) -> dict[str, tuple[int, ...]]:
    """All on the first cards; without any, on CPUs. ConfigError where one service takes more than there are."""
    most = max((seat.count for seat in wanted), default=0)
    if most > available > 0:
        names = ", ".join(seat.name for seat in wanted if seat.count == most)
        raise ConfigError([f"launch.share_gpu: {names} takes {most} GPUs and this box has {available}"])
    return {seat.name: tuple(range(seat.count)) for seat in wanted} if available else {}


def asked(config: Config, available: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What launch.gpus says; a service's own entry goes before that of its role."""
    gpus, present = config.launch.gpus, seats(config)
    problems = list(mistakes(gpus, {seat.name for seat in present} | {seat.role for seat in present}, available))
    if problems:
        raise ConfigError(problems)
    for role in dict.fromkeys(seat.role for seat in present):
        crew = [seat for seat in present if seat.role == role]
        shares = shared_out(role, gpus[role], crew) if role in gpus else {}
        for seat in crew:
            cards = gpus.get(seat.name, shares.get(seat.name))
            if cards is not None:
                yield seat.name, cards


def mistakes(gpus: Mapping[str, tuple[int, ...]], known: set[str], available: int) -> Iterator[str]:
    for name, cards in gpus.items():
        beyond = [index for index in cards if not 0 <= index < available]
        if name not in known:
            yield f"launch.gpus.{name}: no such role or service in this run; there are {', '.join(sorted(known))}"
        elif beyond:
            yield f"launch.gpus.{name}: no GPU {', '.join(map(str, beyond))}: this box has {available}, counted from 0"


def shared_out(role: str, cards: tuple[int, ...], crew: list[Seat]) -> dict[str, tuple[int, ...]]:
    """A role's cards over its services: to each its own, or the same to all. ConfigError for a number between."""
    total, most = sum(seat.count for seat in crew), max(seat.count for seat in crew)
    if len(cards) in (0, most) or not most or (len(crew) == 1 and len(cards) > most):
        return {seat.name: cards for seat in crew}
    if len(cards) != total:
        raise ConfigError(
            [f"launch.gpus.{role}: {len(cards)} GPUs for {len(crew)} services: {most} to share, or {total}"]
        )
    found, first = {}, 0
    for seat in crew:
        found[seat.name] = cards[first : first + seat.count]
        first += seat.count
    return found


def seats(config: Config) -> list[Seat]:
    """Services that may compute on a GPU, the trainer first; one whose device is said takes none by itself."""
    launch = config.launch
    trainer = launch.trainer_ranks if config.trainer.device in ("auto", "cuda") else 0
    rollout = [config.rollout_of(member) for member in config.fleet for _ in range(member.count)]
    references = launch.reference_servers if config.use_reference else 0
    return [
        Seat("trainer", "trainer", trainer),
        *(Seat("rollout", f"rollout-{index}", gpus_of(settings)) for index, settings in enumerate(rollout)),
        *(Seat("reference", f"reference-{index}", 0) for index in range(references)),
        *(Seat("reward", f"reward-{index}", 0) for index in range(launch.reward_servers)),
    ]


def gpus_of(settings: RolloutConfig) -> int:
    """Cards that a rollout server computes on: tensor times data parallel size of its engine."""
    if settings.device not in ("auto", "cuda"):
        return 0
    engine = getattr(settings, settings.engine, None)
    return int(getattr(engine, "tensor_parallel_size", 1)) * int(getattr(engine, "data_parallel_size", 1))
