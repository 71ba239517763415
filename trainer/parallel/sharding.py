"""FSDP2: each repeated layer is sharded by itself, the rest together, over all ranks or within each replica."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.configs.parallel import ParallelConfig
from trainer.model.layers import repeated_layers


def shard(policy: nn.Module, mesh: DeviceMesh, config: ParallelConfig, *, offload: bool) -> None:
    """Turns the parameters of `policy` into shards on the mesh's devices, or in host memory with `offload`.

    The gradient is the mean over the mesh: losses are to be multiplied by its size.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=None if config.compute_dtype == "same" else getattr(torch, config.compute_dtype),
        reduce_dtype=None if config.reduce_dtype == "same" else getattr(torch, config.reduce_dtype),
        output_dtype=None,
        cast_forward_inputs=False,
    )
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for layer in repeated_layers(policy):
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=precision,
            offload_policy=place,
        )
    fully_shard(policy, mesh=mesh, reshard_after_forward=False, mp_policy=precision, offload_policy=place)


def reshard(policy: nn.Module) -> None:
    """Gives back what a forward without a backward has left gathered: an update would not reach it. No exchange."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
