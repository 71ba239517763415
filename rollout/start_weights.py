"""The weights that an engine began with, read again from its checkpoint: what a push of an adapter is added to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from protos import LowRankUpdate
from protos.lowrank import fingerprints
from protos.tensors import TORCH_DTYPES

INDEX = "model.safetensors.index.json"


class StartWeights:
    """Of the layers that an adapter changes, on `device`, from the first push on that wants them.

    Memory: these layers once, in the trainer's dtype; with `whole` all others of the checkpoint too, in its own.
    """

    def __init__(self, path: str, device: torch.device, *, whole: bool = False) -> None:
        """path: a folder, or a hub id whose files are here. whole: for a model that cannot take single layers."""
        self._path = path
        self._device = device
        self._whole = whole
        self._reading = threading.Lock()
        self._names: tuple[str, ...] = ()
        self._bases: dict[str, Tensor] = {}
        self.others: dict[str, Tensor] = {}
        """With `whole`: what the adapter does not change."""

    def bases(self, updates: Sequence[LowRankUpdate]) -> dict[str, Tensor]:
        """By name, in the trainer's dtype. ValueError where the checkpoint lacks one, or it is not the trainer's."""
        names = tuple(f"{one.name} {one.base_dtype} {one.base_checksum}" for one in updates)
        with self._reading:  # by the push before, which ran out of time
            if names != self._names:
                self.others, self._bases = {}, {}
                self._bases = self._read(updates)
                self._names = names
            return self._bases

    def release(self) -> None:
        """Give the memory back; the next push reads again."""
        with self._reading:
            self._names, self._bases, self.others = (), {}, {}

    def _read(self, updates: Sequence[LowRankUpdate]) -> dict[str, Tensor]:
        dtypes = {one.name: TORCH_DTYPES[one.base_dtype] for one in updates}
        found: dict[str, Tensor] = {}
        for name, tensor in self._stored(None if self._whole else dtypes.keys()):
            if name in dtypes:
                found[name] = tensor.to(self._device, dtypes[name])
            else:
                self.others[name] = tensor.to(self._device)
        missing = sorted(dtypes.keys() - found)
        if missing:
            raise ValueError(f"{self._path} has no tensor {missing[0]} ({len(missing)} in all): push it merged")
        sums = fingerprints(found[one.name] for one in updates)
        wrong = [one.name for one, known in zip(updates, sums, strict=True) if known != one.base_checksum]
        if wrong:
            raise ValueError(f"{self._path} is not the trainer's start model: {wrong[0]} differs ({len(wrong)} in all)")
        return found

    def _stored(self, names: Iterable[str] | None) -> Iterator[tuple[str, Tensor]]:
        """Of the checkpoint's files; None: all."""
        for file in files_of(folder_of(self._path), names):
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  # it is no dictionary
                    if names is None or name in names:
                        yield name, stored.get_tensor(name)


def folder_of(path: str) -> Path:
    """The folder itself, or where the hub's files lie on this machine."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", INDEX]
    return Path(snapshot_download(path, allow_patterns=patterns, local_files_only=True))


def files_of(folder: Path, names: Iterable[str] | None) -> list[Path]:
    """The safetensors files that hold these tensors, or all of them; ValueError where there is none."""
    if (folder / INDEX).is_file():
        places: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        wanted = places if names is None else [name for name in names if name in places]
        return [folder / file for file in sorted({places[name] for name in wanted})]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no safetensors")
    return files
