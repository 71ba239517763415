"""The newest checkpoint of a folder that is whole. Nothing is changed here: a run may be writing into the folder."""

import logging
import os
import re
from pathlib import Path

from trainer import durable
from trainer.parallel import ALONE, Ranks

logger = logging.getLogger(__name__)
LATEST = "latest"
STEP = re.compile(r"step_(\d{1,18})")


def newest_whole(folder: Path, ranks: Ranks = ALONE) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and a sentence on each file that made a newer one unusable.

    Begins at the one that `latest` names and goes back in time; only then tries those after it, which stem from a
    crash between rename and pointer or from a line of training that was given up. Problems are logged as errors.
    Several ranks call it together, verify some of the files each, and find the same.
    """
    steps, told = ranks.gather(_candidates(folder) if ranks.leads else None)[0]
    for step in steps:
        target = folder / f"step_{step}"
        found = ranks.gather(durable.problems(target, rank=ranks.rank, size=ranks.size))
        if not any(found):
            return target, _tell(told)
        told.extend(dict.fromkeys(problem for of_rank in found for problem in of_rank))
    return None, _tell(told)


def steps_in(folder: Path) -> list[int]:
    """Of all checkpoints, whole or not, in order."""
    names = (STEP.fullmatch(name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in names if match)


def _candidates(folder: Path) -> tuple[list[int], list[str]]:
    """Steps in the order in which they are tried, and what is wrong with the pointer."""
    steps, told = steps_in(folder), []
    try:
        pointed = STEP.fullmatch(durable.read_bytes(folder / LATEST).decode("ascii", "replace"))
    except OSError as error:
        pointed = None
        if steps:
            told.append(f"{folder / LATEST}: {error.strerror}")
    if pointed and int(pointed[1]) not in steps:
        told.append(f"{folder / pointed[0]} is missing, and {LATEST} names it")
    newest = int(pointed[1]) if pointed else max(steps, default=0)
    return sorted(steps, key=lambda step: (step > newest, -step)), told


def _tell(problems: list[str]) -> list[str]:
    for problem in problems:
        logger.error("checkpoint problem: %s", problem)
    return problems
