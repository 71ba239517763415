"""Loading by torch.distributed.checkpoint: each rank reads what overlaps with its blocks from the files of all ranks.

So it does not matter how many ranks have written and how many read. Nothing is unpickled.
"""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainer.checkpoints.blocks import DTYPES, stored
from trainer.checkpoints.failure import CheckpointFailed


def load_shards(folder: Path, part: str, targets: Mapping[str, Tensor]) -> None:
    """Read one part into `targets`, whole tensors or DTensors: each is in the checkpoint, in the same shape."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # no_dist is meant
            load(dict(targets), storage_reader=BlockReader(folder, part), planner=planner, no_dist=True)
    except CheckpointException as error:
        raise CheckpointFailed(f"{folder}: {part} cannot be read: {error}") from error


class BlockReader(StorageReader):
    """The files of one part of a checkpoint."""

    def __init__(self, folder: Path, part: str) -> None:
        self._folder = folder
        self._part = part
        self._files: dict[MetadataIndex, Path] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._files = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found: dict[str, Any] = {}
        for name, tensor in stored(self._folder, self._part).items():
            chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.shape)) for one in tensor.blocks]
            properties = TensorProperties(dtype=DTYPES[tensor.dtype])
            found[name] = TensorStorageMetadata(properties, torch.Size(tensor.whole), chunks)
            self._files |= {MetadataIndex(name, one.offsets): one.file for one in tensor.blocks}
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The files are known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[Path, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._files[item.storage_index], []).append(item)
        for path, items in by_file.items():
            with safe_open(path, framework="pt") as file:
                for item in items:
                    target = planner.resolve_tensor(item)
                    target.detach().copy_(_box(file, item))
                    planner.commit_tensor(item, target)
        read: Future[None] = Future()
        read.set_result(None)
        return read

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _box(file: Any, item: ReadItem) -> Tensor:
    name, begins, lengths = item.storage_index.fqn, item.storage_offsets, item.lengths
    if not lengths:
        scalar: Tensor = file.get_tensor(name)
        return scalar
    box: Tensor = file.get_slice(name)[tuple(slice(a, a + n) for a, n in zip(begins, lengths, strict=True))]
    return box
