"""The trainer's end of a push in this process: a model, its buckets and the pusher, without a learner."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import protos
from services.errors import OffbeatError
from services.pushes.pushing import Pusher
from services.pushes.reach import reach_of_device
from trainer.model.load import load_model
from trainer.pushes.outgoing import Outgoing
from trainer.pushes.weights import Broadcaster

if TYPE_CHECKING:
    from services.config import Config
    from services.roster import Member

DRIFT = 1 / 64
"""Weights are scaled up and down by this share in turn, so that no push sends what is there already."""


class Sender:
    """Pushes the model of a run, a little different each time. As services/trainer.py puts the parts together."""

    def __init__(self, config: Config, folder: Path) -> None:
        trainer, push = config.trainer, config.push
        model = load_model(
            trainer.model, dtype=trainer.dtype, attn_implementation=trainer.attn_implementation, device=trainer.device
        )
        self.version = 0
        self.before_push: Callable[[int], None] = lambda version: None
        """Called with the version that comes."""
        self._parameters: list[torch.Tensor] = list(model.parameters())
        self._transport = push.transport
        self._outgoing = Outgoing(
            model.named_parameters(),
            bucket_bytes=int(push.bucket_mib * 2**20),
            dtype=None if push.dtype == "auto" else getattr(torch, push.dtype),
            streamed=push.memory == "streamed",
        )
        self._pusher = Pusher(
            self._outgoing,
            Broadcaster(host=push.host, incarnation=1, device=self._outgoing.device),
            name="trainer",
            deadline_seconds=push.deadline_seconds,
            update_mode=config.rollout.update_mode,
            folder=folder / "weights",
            reach=reach_of_device(self._outgoing.device, streamed=self._outgoing.streamed),
        )

    @property
    def num_bytes(self) -> int:
        return self._outgoing.num_bytes

    def hash(self) -> str:
        """Names the weights that were sent last."""
        return self._outgoing.hash()

    async def connect(self, member: Member) -> None:
        address = protos.RolloutAddress(
            name=member.name, address=member.address, capabilities=member.identity.capabilities
        )
        await self._pusher.set_members([address])

    async def close(self) -> None:
        await self._pusher.set_members([])

    async def push(self) -> dict[str, Any]:
        """Change the weights, pack them, push them; milliseconds of the parts."""
        self._drift()
        began = time.perf_counter()
        self._outgoing.pack()
        self._settle()
        packed = time.perf_counter()
        self.version += 1
        self.before_push(self.version)
        report = await self._pusher.push(self.version, transport=self._transport)
        ended = time.perf_counter()
        if report.failed:
            raise OffbeatError(f"version {self.version} was not taken: {dict(report.failed)}")
        return {
            "transport": report.transport,
            "push_ms": 1e3 * (ended - packed),
            "pack_ms": 1e3 * (packed - began),
            "begin_ms": 1e3 * report.begin_seconds,
            "transfer_ms": 1e3 * (report.transfer_seconds - report.begin_seconds),
            "commit_ms": 1e3 * (report.seconds - report.transfer_seconds),
            "stall_ms": 1e3 * report.stall_seconds,
        }

    @torch.no_grad()
    def _drift(self) -> None:
        torch._foreach_mul_(self._parameters, 1 + DRIFT if self.version % 2 else 1 - DRIFT)
        self._settle()

    def _settle(self) -> None:
        if self._outgoing.device.type == "cuda":
            torch.cuda.synchronize(self._outgoing.device)
