"""How a process becomes a rank: by the variables that torchrun sets."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import TrainerConfig
from trainer.parallel.ranks import Ranks

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of this process, before anything is loaded."""

    rank: int
    size: int
    local_rank: int


def seat() -> Seat:
    """As torchrun says; alone where it says nothing."""
    rank, size, local = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
    return Seat(rank=rank, size=size, local_rank=local)


_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def own_device(config: TrainerConfig, place: Seat) -> str:
    """Where several ranks share a box, each takes the CUDA device of its local rank."""
    if place.size > 1 and config.device in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{place.local_rank}"
    return config.device


def start(place: Seat, config: TrainerConfig, *, device: torch.device, store: Store | None = None) -> Ranks:
    """Joins the others. A mesh where the weights are to be sharded, none where every rank is a replica.

    Every collective ends by the config's deadline. store: where the ranks meet; None: as torchrun says. Raises
    ValueError where the replicas do not divide the ranks.
    """
    parallel = config.parallel
    replicas = parallel.replicas or place.size
    if place.size % replicas:
        raise ValueError(f"trainer.parallel.replicas={replicas} does not divide {place.size} ranks")
    if place.size == 1 and not parallel.shards_one_rank:
        return Ranks()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        BACKENDS[device.type],
        store=store if store is not None or place.size > 1 else HashStore(),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=parallel.deadline_seconds),
    )
    whole = replicas == place.size and not parallel.shards_one_rank
    return Ranks(
        rank=place.rank,
        size=place.size,
        mesh=None if whole else _mesh(place.size, replicas, device.type),
        reduce_dtype=None if parallel.reduce_dtype == "same" else getattr(torch, parallel.reduce_dtype),
    )


def _mesh(size: int, replicas: int, kind: str) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
