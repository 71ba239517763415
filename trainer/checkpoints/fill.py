"""A folder gets its files: from one rank, or from several that write at the same time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from trainer import durable
from trainer.checkpoints.blocks import rank_file, whole_file
from trainer.checkpoints.dcp_writer import save_shards
from trainer.checkpoints.exchange import Exchange
from trainer.checkpoints.failure import CheckpointFailed
from trainer.checkpoints.snapshot import Snapshot
from trainer.parallel import Ranks

Measured = dict[str, dict[str, Any]]
"""File name -> its size and hash, of files that are on the disk."""


def fill(folder: Path, taken: Snapshot) -> None:
    """Write whole tensors and all else into a new folder; OSError or SafetensorError."""
    begin(folder, taken)
    for part, shards in taken.parts.items():
        tensors = {name: shard.block for name, shard in shards.items()}
        save_file(tensors, folder / whole_file(part), metadata={"format": "pt"})


def fill_together(folder: Path, taken: Snapshot, exchange: Exchange) -> Measured:
    """Write this rank's blocks, and on rank 0 all else, into the new folder that rank 0 names.

    Gives the files of all ranks. CheckpointFailed, on every rank, where one could not write; RuntimeError where one did
    not answer in time.
    """
    ranks = exchange.ranks
    leader = _together(ranks, lambda: begin(folder, taken) if ranks.leads else "")[0]
    found = _together(ranks, lambda: _write_blocks(folder.with_name(leader), taken, exchange))
    return {name: facts for of_rank in found for name, facts in of_rank.items()}


def begin(folder: Path, taken: Snapshot) -> str:
    """Make the folder with all that is not a tensor in it; gives its name."""
    folder.mkdir(mode=0o700)
    durable.write_bytes(folder / "state.json", json.dumps(taken.state).encode())
    for name, text in taken.texts.items():
        durable.write_bytes(folder / durable.checked_name(name), text.encode())
    for file in taken.files:
        durable.write_bytes(folder / durable.checked_name(file.name), file.read_bytes())
    return folder.name


def _write_blocks(folder: Path, taken: Snapshot, exchange: Exchange) -> Measured:
    paths = {part: folder / rank_file(part, rank=exchange.ranks.rank, size=exchange.ranks.size) for part in taken.parts}
    problems: list[Exception] = []
    for part, path in paths.items():
        try:
            save_shards(taken.parts[part], path, exchange.group)
        except (OSError, SafetensorError) as error:  # the others go on with the next part, too
            problems.append(error)
    if problems:
        raise problems[0]
    return {path.name: durable.measured(path) for path in paths.values()}


def _together(ranks: Ranks, work: Callable[[], Any]) -> list[Any]:
    """What the work of each rank came to, told to all; what JSON holds."""
    result, problem = None, ""
    try:
        result = work()
    except (OSError, SafetensorError) as error:
        problem = f"rank {ranks.rank}: {error}"
    told = ranks.gather([result, problem])
    problems = [problem for _, problem in told if problem]
    if problems:
        raise CheckpointFailed("; ".join(problems))
    return [result for result, _ in told]
