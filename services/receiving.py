"""The receiving end of a push, as RPCs of a rollout server: begin, commit or abort; newest incarnation only.

Tensors land in staging buffers while decoding goes on; only a commit, after every checksum fits, touches the weights.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

import protos
from protos.buckets import weights_hash
from services.faults import fault

if TYPE_CHECKING:
    from rollout.engine import Engine, UpdateMode
    from rollout.weights import Incoming

MODES: dict[int, UpdateMode] = {
    protos.UPDATE_MODE_KEEP: "keep",
    protos.UPDATE_MODE_RECOMPUTE: "recompute",
    protos.UPDATE_MODE_RESTART: "restart",
}


class Receiving:
    """Mixed into the rollout service, whose engine it loads."""

    name: str
    engine: Engine

    def start_receiving(self, update_mode: UpdateMode) -> None:
        from rollout.weights import Receiver

        self.has_version = False
        self.weights_hash = ""
        self._receiver = Receiver()
        self._update_mode = update_mode
        self._incoming: Incoming | None = None
        self._deadline = 0.0
        self._newest_incarnation = 0

    async def BeginPush(self, request: protos.BeginPushRequest, context: Any) -> protos.BeginPushReply:
        await self._fence(request.incarnation, context)
        fault(self.name, "push.begin")
        if not self._receiver.knows(request.manifest):
            return protos.BeginPushReply(manifest_unknown=True)
        self._deadline = asyncio.get_running_loop().time() + request.deadline_seconds
        version = request.policy_version
        if request.transport == protos.TRANSPORT_GLOO:
            self._incoming = self._receiver.from_broadcast(
                version, request.manifest, request.rendezvous, deadline_seconds=request.deadline_seconds
            )
        elif request.transport == protos.TRANSPORT_DISK:
            self._incoming = self._receiver.from_disk(version, request.manifest, Path(request.path))
        else:
            name = protos.Transport.Name(request.transport)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{self.name} cannot receive by {name}")
        return protos.BeginPushReply()

    async def CommitPush(self, request: protos.CommitPushRequest, context: Any) -> protos.CommitPushReply:
        await self._fence(request.incarnation, context)
        incoming = self._incoming
        if incoming is None or incoming.version != request.policy_version:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"no push of version {request.policy_version} is open"
            )
        assert incoming is not None
        began = time.monotonic()
        try:
            async with asyncio.timeout_at(self._deadline):
                await asyncio.wrap_future(incoming.arrived)
        except (TimeoutError, RuntimeError, OSError) as error:
            self._drop_incoming()
            await context.abort(grpc.StatusCode.ABORTED, f"the transfer failed: {type(error).__name__}: {error}")
        if fault(self.name, "push.commit") == "flip":
            incoming.buffers[0][0] ^= 1
        wrong = incoming.mismatches(request.checksums)
        if wrong:
            self._drop_incoming()
            await context.abort(grpc.StatusCode.DATA_LOSS, f"checksum mismatch in buckets {wrong[:10]}")
        arrived = time.monotonic()
        mode = MODES.get(request.update_mode, self._update_mode)
        await self.engine.load_weights(incoming.version, incoming.tensors(), mode)
        self.has_version, self._incoming = True, None
        self.weights_hash = weights_hash(incoming.manifest_hash, request.checksums)
        return protos.CommitPushReply(transfer_seconds=arrived - began, swap_seconds=time.monotonic() - arrived)

    async def AbortPush(self, request: protos.AbortPushRequest, context: Any) -> protos.AbortPushReply:
        await self._fence(request.incarnation, context)
        self._drop_incoming()
        return protos.AbortPushReply(serving=self.has_version)

    def _drop_incoming(self) -> None:
        """The staging buffers go; the weights in use were not touched."""
        self._incoming = None
        self._receiver.forget_group()

    async def _fence(self, incarnation: int, context: Any) -> None:
        """An older trainer is told that it has been replaced."""
        if incarnation < self._newest_incarnation:
            text = f"trainer incarnation {incarnation} is fenced off by {self._newest_incarnation}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        self._newest_incarnation = incarnation
