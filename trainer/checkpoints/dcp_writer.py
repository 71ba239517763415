"""Saving by torch.distributed.checkpoint: each rank writes its own blocks to safetensors files of its own.

The planner and the storage are ours, so that nothing is pickled, neither on the disk nor on a socket.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainer.checkpoints.blocks import PLACES
from trainer.checkpoints.shards import Shard


def save_shards(shards: Mapping[str, Shard], path: Path, group: dist.ProcessGroup) -> None:
    """Write this rank's blocks of one part; every rank of `group` is to call it. OSError or SafetensorError.

    An error is kept until all have met at the end, so that nobody waits for one who has left.
    """
    writer = BlockWriter(path)
    # Without collectives of DCP's own: those send pickles.
    save(dict(shards), storage_writer=writer, planner=ShardPlanner(), process_group=group, use_collectives=False)
    if writer.problem is not None:
        raise writer.problem


class ShardPlanner(SavePlanner):
    """Saves what it is given: shards by name."""

    def set_up_planner(
        self, state_dict: dict[str, Shard], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._shards = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(name, shard) for name, shard in self._shards.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})  # each file says for itself what lies in it

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._shards[write_item.index.fqn].block


def _write_item(name: str, shard: Shard) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(shard.offsets), sizes=shard.block.shape)
    properties = TensorProperties(dtype=shard.block.dtype)
    return WriteItem(
        index=MetadataIndex(name, shard.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shard.whole)),
    )


class BlockWriter(StorageWriter):
    """One safetensors file; where its blocks lie stands in its metadata."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem: OSError | SafetensorError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.problem = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        blocks: dict[str, Tensor] = {}
        places: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for item in plan.items:
            block, data = planner.resolve_data(item), item.tensor_data
            assert isinstance(block, Tensor) and data is not None
            blocks[item.index.fqn] = block
            places[item.index.fqn] = (*data.size,), (*data.chunk.offsets,)
        try:
            save_file(blocks, self._path, metadata={"format": "pt", PLACES: json.dumps(places)})
        except (OSError, SafetensorError) as error:
            self.problem = error
        written: Future[list[WriteResult]] = Future()
        written.set_result([])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing is to be written beside the blocks."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
