"""The receiving end of a push, as RPCs of a rollout server: begin, commit or abort; newest incarnation only.

Tensors land in staging memory while decoding goes on; only a commit, after every checksum fits, touches the weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import grpc

import protos
from protos.buckets import weights_hash
from services.faults import fault
from services.sleeping import Sleeping

if TYPE_CHECKING:
    from rollout.engine import UpdateMode

logger = logging.getLogger(__name__)
GRACE_SECONDS = 2.0
"""Past the deadline of a push: its receiver has given up by then and says why."""
TRANSPORTS: dict[int, str] = {
    protos.TRANSPORT_NCCL: "nccl",
    protos.TRANSPORT_IPC: "ipc",
    protos.TRANSPORT_GLOO: "gloo",
    protos.TRANSPORT_DISK: "disk",
}
MODES: dict[int, UpdateMode] = {
    protos.UPDATE_MODE_KEEP: "keep",
    protos.UPDATE_MODE_RECOMPUTE: "recompute",
    protos.UPDATE_MODE_RESTART: "restart",
}


class Receiving(Sleeping):
    """Mixed into the rollout service, whose engine receives, also while it sleeps."""

    def start_receiving(self, update_mode: UpdateMode) -> None:
        self.has_version = False
        self.weights_hash = ""
        self._manifests: dict[str, protos.Manifest] = {}
        self._update_mode = update_mode
        self._open: protos.BeginPushRequest | None = None
        self._deadline = 0.0
        self._newest_incarnation = 0

    async def BeginPush(self, request: protos.BeginPushRequest, context: Any) -> protos.BeginPushReply:
        await self._fence(request.incarnation, context)
        fault(self.name, "push.begin")
        if request.manifest.tensors:
            self._manifests[request.manifest.hash] = request.manifest
        elif request.manifest.hash not in self._manifests:
            return protos.BeginPushReply(manifest_unknown=True)
        transport = TRANSPORTS.get(request.transport, "an unknown transport")
        if transport not in self.engine.transports:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{self.name} cannot receive by {transport}")
        whole = protos.BeginPushRequest()
        whole.CopyFrom(request)
        whole.manifest.CopyFrom(self._manifests[request.manifest.hash])
        self._deadline = asyncio.get_running_loop().time() + request.deadline_seconds + GRACE_SECONDS
        self._open = whole
        try:
            await self.engine.open_push(whole)
        except (ValueError, RuntimeError) as error:
            self._open = None
            await context.abort(grpc.StatusCode.ABORTED, f"the push cannot begin: {error}")
        return protos.BeginPushReply()

    async def CommitPush(self, request: protos.CommitPushRequest, context: Any) -> protos.CommitPushReply:
        await self._fence(request.incarnation, context)
        opened = self._open
        if opened is None or opened.policy_version != request.policy_version:
            text = f"no push of version {request.policy_version} is open"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        assert opened is not None
        began = time.monotonic()
        await self._arrive(request, context)
        arrived = time.monotonic()
        mode = MODES.get(request.update_mode, self._update_mode)
        async with self.turning:
            await self.rouse()
            stall_seconds = await self.engine.swap(request.policy_version, mode)
        self.has_version, self._open = True, None
        self.weights_hash = weights_hash(opened.manifest.hash, request.checksums)
        return protos.CommitPushReply(transfer_seconds=arrived - began, swap_seconds=stall_seconds)

    async def _arrive(self, request: protos.CommitPushRequest, context: Any) -> None:
        """Wait for the transfer; a broken or a wrong one ends the call, and the weights in use stay."""
        checksums = list(request.checksums)
        if fault(self.name, "push.commit") == "flip":
            checksums[0] ^= 1
        try:
            async with asyncio.timeout_at(self._deadline):
                await self.engine.await_push(checksums)
        except (TimeoutError, RuntimeError) as error:
            await self._drop()
            code = grpc.StatusCode.DATA_LOSS if getattr(error, "corrupt", False) else grpc.StatusCode.ABORTED
            await context.abort(code, f"the transfer failed: {str(error) or type(error).__name__}")

    async def AbortPush(self, request: protos.AbortPushRequest, context: Any) -> protos.AbortPushReply:
        await self._fence(request.incarnation, context)
        await self._drop()
        return protos.AbortPushReply(serving=self.has_version)

    async def _drop(self) -> None:
        """The staging memory goes; the weights in use were not touched."""
        self._open = None
        await self.engine.drop_push()

    async def _fence(self, incarnation: int, context: Any) -> None:
        """An older trainer is told that it has been replaced."""
        if incarnation < self._newest_incarnation:
            text = f"trainer incarnation {incarnation} is fenced off by {self._newest_incarnation}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        self._newest_incarnation = incarnation
