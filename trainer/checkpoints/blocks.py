"""The files of one part of a checkpoint, and which blocks of which tensors lie in them.

model.safetensors                       whole tensors
rank-0-of-4.model.safetensors, ...      blocks; the file's metadata says where each lies in its tensor
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints.failure import CheckpointFailed

PLACES = "offbeat.places"
"""In a file's metadata: {tensor name: [shape of the whole, offsets of the block]} as JSON."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A box of a tensor, in a file."""

    file: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of a checkpoint."""

    whole: tuple[int, ...]
    dtype: str
    """As safetensors names it."""
    blocks: list[Block]

    @property
    def num_bytes(self) -> int:
        return prod(self.whole) * DTYPES[self.dtype].itemsize


def whole_file(part: str) -> str:
    """The file of a part that one rank has written; `critic/model` is critic-model.safetensors."""
    return f"{part.replace('/', '-')}.safetensors"


def rank_file(part: str, *, rank: int, size: int) -> str:
    """The file of one of several ranks."""
    return f"rank-{rank}-of-{size}.{whole_file(part)}"


def files_of(folder: Path, part: str) -> list[Path]:
    """All files of a part, by rank; CheckpointFailed where there are none."""
    pattern = re.compile(rf"(?:rank-(\d+)-of-\d+\.)?{re.escape(whole_file(part))}")
    found = [(match, file) for file in folder.iterdir() if (match := pattern.fullmatch(file.name))]
    if not found:
        raise CheckpointFailed(f"{folder} has no {whole_file(part)}, nor one of any rank")
    return [file for _, file in sorted(found, key=lambda one: int(one[0][1] or 0))]


def stored(folder: Path, part: str) -> dict[str, Stored]:
    """Every tensor of a part; CheckpointFailed for one that is not there as a whole."""
    found: dict[str, Stored] = {}
    for file in files_of(folder, part):
        for name, whole, dtype, block in _blocks(file):
            found.setdefault(name, Stored(whole=whole, dtype=dtype, blocks=[])).blocks.append(block)
    for name, tensor in found.items():
        if sum(prod(block.shape) for block in tensor.blocks) != prod(tensor.whole):
            raise CheckpointFailed(f"{folder}: the blocks of {name} do not make up {tensor.whole}")
    return found


def _blocks(file: Path) -> Iterator[tuple[str, tuple[int, ...], str, Block]]:
    header = read_header(file)
    places = json.loads(header.pop("__metadata__", {}).get(PLACES, "{}"))
    for name, entry in header.items():
        shape = (*entry["shape"],)
        whole, offsets = places.get(name, (shape, (0,) * len(shape)))
        yield name, (*whole,), entry["dtype"], Block(file=file, offsets=(*offsets,), shape=shape)


def read_header(path: Path) -> dict[str, Any]:
    """The JSON at the beginning of a safetensors file: shape and dtype of each tensor, and `__metadata__`."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        found: dict[str, Any] = json.loads(file.read(size))
    return found
