"""One rank of a trainer whose model is sharded by FSDP2; rank 0 pushes version after version to a rollout server.

Told by one JSON argument; rank 0 prints what came of it as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import protos
from protos import groups
from services.pushes.pushing import Pusher
from trainer.pushes.gather import Fill, GatherFailed
from trainer.pushes.outgoing import Outgoing
from trainer.pushes.weights import Broadcaster

BUCKET_BYTES = 10_000


def changed_model(folder: str | Path, *, seed: int) -> nn.Module:
    """The model in `folder` with other weights, the same for every process."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


class Recorder:
    """Writes down in one file, line by line, when a fill begins and when a broadcast has ended."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.fills = self.sent = 0

    def note(self, event: str) -> None:
        os.write(self._file, f"{event}\n".encode())

    def watch_fills(self, *, die_at: int = 0) -> None:
        fill = Fill.__call__

        def watched(this: Fill) -> Tensor:
            self.note(f"fill {self.fills}")
            self.fills += 1
            if self.fills == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return fill(this)

        Fill.__call__ = watched  # type: ignore[method-assign,assignment]

    def watch_broadcasts(self) -> None:
        recorder = self

        class Watched(ProcessGroupGloo):
            """Torch's own group; its works say when they are done."""

            def broadcast(self, buffer: Tensor, root: int) -> dist.Work:
                work: dist.Work = super().broadcast(buffer, root)  # type: ignore[misc]  # torch's stubs leave it out
                number, recorder.sent = recorder.sent, recorder.sent + 1
                work.get_future().then(lambda _: recorder.note(f"sent {number}"))
                return work

        groups.ProcessGroupGloo = Watched  # type: ignore[attr-defined]


async def push_all(outgoing: Outgoing, model: nn.Module, spec: dict[str, Any]) -> dict[str, Any]:
    pusher = Pusher(
        outgoing,
        Broadcaster(host="127.0.0.1", incarnation=1),
        name="trainer",
        deadline_seconds=spec["deadline_seconds"],
        update_mode="keep",
        folder=Path(spec["folder"]) / "weights",
    )
    told: dict[str, Any] = {"committed": [], "hashes": [], "failed": ""}
    await pusher.set_members([protos.RolloutAddress(name="rollout-0", address=spec["address"])])
    began = time.monotonic()
    try:
        for version, transport in enumerate(spec["transports"], start=1):
            await asyncio.to_thread(next_version, outgoing, model, version)
            began = time.monotonic()
            report = await pusher.push(version, transport=transport)
            told["committed"].append(list(report.committed))
            told["hashes"].append(outgoing.hash())
    except GatherFailed as error:
        told["failed"] = str(error)
    told["seconds"] = time.monotonic() - began
    await pusher.set_members([])
    return told


def next_version(outgoing: Outgoing, model: nn.Module, version: int) -> None:
    """Stands for a step: version 1 is the model as it is, every later one is twice the one before."""
    if version > 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
    outgoing.pack()


def main() -> None:
    spec = json.loads(sys.argv[1])
    rank: int = spec["rank"]
    torch.set_num_threads(1)
    meeting = f"file://{spec['folder']}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model = changed_model(spec["model"], seed=7)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    outgoing = Outgoing(model.named_parameters(), bucket_bytes=BUCKET_BYTES, streamed=True)
    recorder = Recorder(Path(spec["folder"]) / f"events-{rank}")
    recorder.watch_fills(die_at=spec["die_at_fill"] if rank else 0)
    if rank == 0:
        recorder.watch_broadcasts()
        print(json.dumps(asyncio.run(push_all(outgoing, model, spec))), flush=True)
    else:
        for version, _ in enumerate(spec["transports"], start=1):
            next_version(outgoing, model, version)
            outgoing.follow()
    os._exit(0)  # a group with a dead rank cannot be taken down


if __name__ == "__main__":
    main()
