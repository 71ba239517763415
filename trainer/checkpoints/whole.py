"""The files of several ranks as one model, tensor by tensor: memory holds the largest tensor, not the model."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trainer.checkpoints.blocks import DTYPES, Stored, stored, whole_file

FILE_BYTES = 5 * 10**9
"""A model above this goes into several files, as Hugging Face has it."""


def write_whole(checkpoint: Path, part: str, out: Path, *, file_bytes: int = FILE_BYTES) -> None:
    """Write one part as whole tensors: in one file, or in several and an index of them."""
    found = stored(checkpoint, part)
    groups = list(_groups(found, file_bytes))
    names = _file_names(part, len(groups))
    with ExitStack() as opened:
        files = {file: opened.enter_context(safe_open(file, framework="pt")) for file in _files(found)}
        for name, group in zip(names, groups, strict=True):
            _write_file(out / name, {key: found[key] for key in group}, files)
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in found.values())},
            "weight_map": {key: name for name, group in zip(names, groups, strict=True) for key in group},
        }
        (out / f"{whole_file(part)}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def whole_tensors(checkpoint: Path, part: str) -> dict[str, Tensor]:
    """A small part, as a whole in memory."""
    found = stored(checkpoint, part)
    with ExitStack() as opened:
        files = {file: opened.enter_context(safe_open(file, framework="pt")) for file in _files(found)}
        return {name: _assembled(name, tensor, files) for name, tensor in found.items()}


def _files(found: Mapping[str, Stored]) -> set[Path]:
    return {block.file for tensor in found.values() for block in tensor.blocks}


def _groups(found: Mapping[str, Stored], file_bytes: int) -> Iterator[list[str]]:
    """Names in order, a list for each file; a tensor that is larger than a file has one to itself."""
    group: list[str] = []
    size = 0
    for name in sorted(found):
        if group and size + found[name].num_bytes > file_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += found[name].num_bytes
    yield group


def _file_names(part: str, count: int) -> list[str]:
    stem, _, end = whole_file(part).rpartition(".")
    if count == 1:
        return [whole_file(part)]
    return [f"{stem}-{number:05d}-of-{count:05d}.{end}" for number in range(1, count + 1)]


def _write_file(path: Path, tensors: Mapping[str, Stored], files: Mapping[Path, Any]) -> None:
    """A safetensors file: the length of its header, the header, and the tensors one after the other.

    Those of wide dtypes come first: so all are aligned.
    """
    ordered = sorted(tensors.items(), key=lambda one: (-DTYPES[one[1].dtype].itemsize, one[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        offsets = [end, end := end + tensor.num_bytes]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.whole, "data_offsets": offsets}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("xb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, tensor in ordered:
            whole = _assembled(name, tensor, files)
            whole.reshape(-1).view(torch.uint8).numpy().tofile(file)


def _assembled(name: str, tensor: Stored, files: Mapping[Path, Any]) -> Tensor:
    place = torch.empty(tensor.whole, dtype=DTYPES[tensor.dtype])
    for block in tensor.blocks:
        box = tuple(slice(begin, begin + size) for begin, size in zip(block.offsets, block.shape, strict=True))
        place[box] = files[block.file].get_tensor(name)
    return place
