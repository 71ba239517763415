"""What a process has for pushes, looked up where torch is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.pushes.transports import Reach, nccl_of

if TYPE_CHECKING:
    import torch

    from rollout.engine import Engine


def reach_of_device(device: torch.device, *, streamed: bool = False) -> Reach:
    """Of a trainer on this device. Weights that are streamed never lie there whole, for ipc."""
    from protos.groups import nccl_version
    from protos.ipc import gpu_of

    if device.type != "cuda":
        return Reach(transports=frozenset({"gloo", "disk"}))
    return Reach(
        transports=frozenset({"nccl", "gloo", "disk"} if streamed else {"nccl", "ipc", "gloo", "disk"}),
        gpus=frozenset({gpu_of(device)}),
        nccl=nccl_of(nccl_version()),
    )


def reach_of_engine(engine: Engine) -> Reach:
    """Of a rollout server with this engine. An engine may set NCCL variables in the processes that it starts."""
    from protos.groups import nccl_version

    settings: dict[str, str] = getattr(engine, "nccl_environment", {})
    return Reach(
        transports=frozenset(engine.transports),
        gpus=frozenset(engine.gpus),
        nccl=nccl_of(nccl_version(), settings) if "nccl" in engine.transports else "",
        receivers=engine.receivers,
    )
