"""Our back end of vLLM's weight transfer, in each worker: staging memory that a push fills, taken over at the swap.

vLLM's own calls (init, start, update, finish) carry one whole push; between two tokens, the engine uses `take` alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from protos import BeginPushRequest
from protos.buckets import plan_buckets
from protos.ipc import gpu_of
from protos.tensors import make_buffers, named_views
from rollout.engines.install import Installer
from rollout.engines.vllm_link import PATH_VARIABLE, Link
from rollout.engines.vllm_reload import Reload, copies_plainly
from rollout.start_weights import StartWeights
from rollout.weights import Receiver

if TYPE_CHECKING:
    from protos.groups import Group


@dataclass
class PushInit(WeightTransferInitInfo):
    """Nothing: each push names its own group."""


@dataclass
class PushUpdate(WeightTransferUpdateInfo):
    """One push. request: a serialized BeginPushRequest with its whole manifest. checksums: one for each bucket."""

    request: bytes
    checksums: list[int]


class PushTransfer(WeightTransferEngine[PushInit, PushUpdate]):
    """Receives by NCCL, Gloo, CUDA IPC or from a file, whichever a push says."""

    init_info_cls = PushInit
    update_info_cls = PushUpdate

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        whole = not copies_plainly(model, device)
        self._receiver = Receiver(device, start=StartWeights(self.model_config.model, device, whole=whole))
        self._installer = self._make_installer()
        self._link = self._connect() if PATH_VARIABLE in os.environ else None

    @property
    def rank(self) -> int:
        """Of this worker among all workers of the server."""
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def init_transfer_engine(self, init_info: PushInit) -> None:
        """Nothing to agree upon."""

    def start_weight_update(self) -> None:
        """Nothing to prepare: the weights stay as they are until `finish_weight_update`."""

    def receive_weights(self, update_info: PushUpdate) -> None:
        """Receive one push into staging memory and verify it; TransferFailed."""
        self._receiver.open(BeginPushRequest.FromString(update_info.request), rank_offset=self.rank)
        self._receiver.wait(update_info.checksums)

    def finish_weight_update(self) -> None:
        """Take what has arrived as the weights."""
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Bring staging memory into the model; returns when it may be overwritten."""
        self._installer.install(self._receiver.tensors())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._receiver.taken()

    def forget(self) -> None:
        """Hold on to staging memory no longer: the next push brings other memory."""
        self._installer = self._make_installer()

    def shutdown(self) -> None:
        """Forget an open push and its group."""
        if self._link is not None:
            self._link.close()
        self._receiver.drop()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: dict[str, Any]) -> None:
        """Broadcast (name, tensor) pairs from rank 0. trainer_args: group, manifest, device, deadline_seconds."""
        plan = plan_buckets(trainer_args["manifest"])
        buffers = make_buffers(plan, device=trainer_args["device"])
        places = dict(named_views(plan, buffers))
        for name, tensor in iterator:
            places[name].copy_(tensor)
        group: Group = trainer_args["group"]
        group.broadcast(buffers, deadline_seconds=trainer_args["deadline_seconds"])

    def _make_installer(self) -> Installer:
        if copies_plainly(self.model, self.device):
            return Installer(self.model, load=self.model.load_weights)
        reload = Reload(self.model, self.model_config)
        return Installer(self.model, load=reload.load, finish=reload.finish)

    def _connect(self) -> Link:
        cuda = self.device.type == "cuda"
        return Link(
            self._receiver,
            rank=self.rank,
            gpu=gpu_of(self.device) if cuda else "",
            on_thread=(lambda: torch.cuda.set_device(self.device)) if cuda else (lambda: None),
            forget=self.forget,
        )
