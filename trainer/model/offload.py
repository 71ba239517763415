"""What leaves the device while it is not needed: moments between two updates, and weights between two steps.

    none        everything stays
    optimizer   moments lie in host memory and come for each update
    all         weights leave, too, once a step is over and they are packed for the push

Cost: each update moves the moments there and back, twice their bytes over the bus (0.6B parameters in float32: 4.8 GB
each way, 0.2 s at 25 GB/s); a step with `all` moves the weights once each way. Host memory is pinned where there is a
GPU; torch rounds each pinned tensor up to a power of two. On a CPU the same copies are made, to no gain.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.config import OffloadMode

Key = tuple[int, str]
"""(id of the parameter, name of its state; empty for the parameter itself)."""
Move = Callable[[Key, Tensor], Tensor]


class Offload:
    """Moves the state of one model and its optimizer; every tensor keeps one place in host memory."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mode: OffloadMode) -> None:
        self.mode = mode
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._device = self._parameters[0].device
        self._hosts: dict[Key, Tensor] = {}

    @torch.no_grad()
    def bring_weights(self) -> None:
        """The weights are on the device from here on."""
        for parameter in self._parameters:
            parameter.data = self._on_device((id(parameter), ""), parameter.data)

    @torch.no_grad()
    def leave(self) -> None:
        """A step is over: what need not stay leaves, and the device gets back what torch holds in reserve."""
        if self.mode == "none":
            return
        if self.mode == "all":
            for parameter in self._parameters:
                parameter.data = self._on_host((id(parameter), ""), parameter.data)
        self._move_moments(self._on_host)  # those of a checkpoint come on the device
        self._wait()

    @contextmanager
    def moments(self) -> Iterator[None]:
        """Inside, the moments are on the device."""
        if self.mode == "none":
            yield
            return
        self._move_moments(self._on_device)
        try:
            yield
        finally:
            self._move_moments(self._on_host)
            self._wait()

    @torch.no_grad()
    def _move_moments(self, moved: Move) -> None:
        for parameter, states in self._optimizer.state.items():
            for name, value in states.items():
                states[name] = moved((id(parameter), name), value)

    def _on_device(self, key: Key, value: Tensor) -> Tensor:
        host = self._hosts.get(key)
        if host is None or host.data_ptr() != value.data_ptr():
            return value
        return value.to(self._device, copy=True, non_blocking=True)

    def _on_host(self, key: Key, value: Tensor) -> Tensor:
        if key not in self._hosts:
            pinned = self._device.type == "cuda"
            self._hosts[key] = torch.empty_like(value, device="cpu", pin_memory=pinned)
        host = self._hosts[key]
        return host if host.data_ptr() == value.data_ptr() else host.copy_(value, non_blocking=True)

    def _wait(self) -> None:
        """A copy to pinned memory may still be under way; its source is free after it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
