"""One rank of a trainer on GPUs whose model is sharded by FSDP2; rank 0 is told what to do, one JSON command a line.

argv: rank, number of ranks, folder where they meet, how many versions will be pushed.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from protos import BeginPushRequest
from services.pushes.transports import WIRE
from trainer.pushes.outgoing import Outgoing
from trainer.pushes.weights import Broadcaster, Crew, Receiving

BUCKET_BYTES = 4 * 2**20
SECONDS = 30.0


def make_model() -> nn.Sequential:
    """An odd number of rows, parameters larger than a bucket and parameters of which many fit."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(20_001, 512), *(nn.Linear(512, 512) for _ in range(40)), nn.Linear(512, 8000))


def next_version(model: nn.Module, version: int) -> None:
    """Version 1 is the model as it was made; each later one is twice the one before, exactly."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 if version == 1 else 2.0)


def outgoing_of(model: nn.Module, *, streamed: bool) -> Outgoing:
    return Outgoing(model.named_parameters(), bucket_bytes=BUCKET_BYTES, dtype=torch.bfloat16, streamed=streamed)


class Lead:
    """Rank 0."""

    def __init__(self, outgoing: Outgoing, model: nn.Module) -> None:
        self.outgoing = outgoing
        self.model = model
        self.broadcaster = Broadcaster(host="127.0.0.1", incarnation=1, device=outgoing.device)
        self.crew: Crew | None = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        return self.begin(command["begin"]) if "begin" in command else self.send(command["send"])

    def begin(self, version: int) -> dict[str, Any]:
        """Step to a version: the request that opens its push."""
        next_version(self.model, version)
        self.outgoing.pack()
        self.crew = self.broadcaster.crew("nccl", [Receiving("server")])
        request = BeginPushRequest(policy_version=version, manifest=self.outgoing.manifest, transport=WIRE["nccl"])
        request.deadline_seconds = SECONDS
        request.rendezvous.CopyFrom(self.crew.place("server"))
        return {"request": base64.b64encode(request.SerializeToString()).decode()}

    def send(self, deadline_seconds: float) -> dict[str, Any]:
        assert self.crew is not None
        sending = self.broadcaster.send(self.crew, self.outgoing.to_send("nccl"), deadline_seconds=deadline_seconds)
        failed = ""
        try:
            sending.result(SECONDS)
        except RuntimeError as error:
            failed = str(error)
            self.broadcaster.forget(self.crew)
        self.outgoing.conclude()
        return {"failed": failed, "checksums": self.outgoing.checksums}


def main() -> None:
    rank, world, folder, versions = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    model = make_model().to(device)
    mesh = init_device_mesh("cuda", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    outgoing = outgoing_of(model, streamed=True)
    if rank == 0:
        lead = Lead(outgoing, model)
        for line in sys.stdin:
            print(json.dumps(lead.answer(json.loads(line))), flush=True)
    else:
        for version in range(1, versions + 1):
            next_version(model, version)
            outgoing.follow()
    os._exit(0)  # whoever is left at the end of a test does not wait for the others


if __name__ == "__main__":
    main()
