"""The receiving end of an engine whose model lives in the server's own process."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from protos import BeginPushRequest
from protos.ipc import gpu_of
from rollout.engine import UpdateMode
from rollout.start_weights import StartWeights
from rollout.weights import Receiver


class InProcessPush(ABC):
    """Mixed into an engine; the push part of `Engine`, by way of the engine's `load_weights`."""

    def start_receiving(self, device: torch.device, *, path: str) -> None:
        """path: of the model that was loaded; empty: pushes of adapters are refused."""
        self._receiver = Receiver(device, start=StartWeights(path, device) if path else None)

    @abstractmethod
    async def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]], mode: UpdateMode) -> None:
        """What the engine does at a swap: between two tokens, all tensors or none."""

    @property
    def receivers(self) -> int:
        """This process alone."""
        return 1

    @property
    def transports(self) -> tuple[str, ...]:
        """All that the device allows."""
        return ("nccl", "ipc", "gloo", "disk") if self._receiver.device.type == "cuda" else ("gloo", "disk")

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUID of the card, empty on a CPU."""
        return (gpu_of(self._receiver.device),) if self._receiver.device.type == "cuda" else ()

    async def open_push(self, request: BeginPushRequest) -> None:
        """Begin to receive on a thread of its own."""
        await asyncio.to_thread(self._receiver.open, request)

    async def await_push(self, checksums: Sequence[int]) -> None:
        """Wait on a thread; TransferFailed."""
        await asyncio.to_thread(self._receiver.wait, checksums)

    async def swap(self, version: int, mode: UpdateMode) -> float:
        """Copy what has arrived into the model between two tokens."""
        began = time.monotonic()
        await self.load_weights(version, self._receiver.tensors(), mode)
        self._receiver.taken()
        return time.monotonic() - began

    async def drop_push(self) -> None:
        """Forget it; the model was not touched."""
        await asyncio.to_thread(self._receiver.drop)
