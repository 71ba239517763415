"""Weights from one GPU to another process: NCCL between two cards, CUDA IPC on one, Gloo and disk from a card."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protos import BeginPushRequest
from protos.buckets import checksum
from protos.tensors import checksums
from services.pushes.transports import WIRE
from trainer.pushes.outgoing import Outgoing
from trainer.pushes.weights import Broadcaster, Crew, Receiving

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
SECONDS = 20.0


class Other:
    """The receiving process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.hear()

    def open(self, request: BeginPushRequest) -> None:
        assert self.ask(open=base64.b64encode(request.SerializeToString()).decode()) == {"opened": True}


@contextmanager
def receiver_on(device: str) -> Iterator[Other]:
    command = [sys.executable, "-m", "tests.gpu.receiver", device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Other(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=30)


def outgoing_on(device: str, *, megabytes: int = 64) -> Outgoing:
    torch.manual_seed(1)
    shapes = [(megabytes * 2**16, 4), (1000, 3), (7,)]
    named = [(f"p{at}", torch.randn(shape, device=device).bfloat16()) for at, shape in enumerate(shapes)]
    outgoing = Outgoing(named, bucket_bytes=16 * 2**20)
    outgoing.pack()
    return outgoing


def begin(outgoing: Outgoing, kind: str, *, version: int, crew: Crew | None = None, path: str = "") -> BeginPushRequest:
    request = BeginPushRequest(policy_version=version, manifest=outgoing.manifest, transport=WIRE[kind], path=path)
    request.deadline_seconds = SECONDS
    if crew is not None:
        request.rendezvous.CopyFrom(crew.place("server"))
    if kind == "ipc":
        request.shared.extend(outgoing.shared())
    return request


def sums_of(outgoing: Outgoing) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in outgoing.named_views().items()}


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_a_checksum_on_a_gpu_is_the_one_of_the_host() -> None:
    data = torch.randint(0, 256, (8 * 500_001,), dtype=torch.uint8)
    assert checksums([data.cuda()]) == [checksum(data.numpy())]
    assert checksums([data.cuda()]) == [checksum(np.ascontiguousarray(data.numpy()))]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_nccl_brings_version_after_version_in_one_group() -> None:
    outgoing = outgoing_on("cuda:0")
    broadcaster = Broadcaster(host="127.0.0.1", incarnation=1, device=outgoing.device)
    with receiver_on("cuda:1") as other:
        for version in (1, 2, 3):
            crew = broadcaster.crew("nccl", [Receiving("server")])
            other.open(begin(outgoing, "nccl", version=version, crew=crew))
            broadcaster.send(crew, outgoing.buffers, deadline_seconds=SECONDS).result(SECONDS)
            assert other.ask(wait=outgoing.checksums) == {"sums": sums_of(outgoing)}
        wrong = [outgoing.checksums[0] ^ 1, *outgoing.checksums[1:]]
        other.open(begin(outgoing, "nccl", version=4, crew=crew))
        broadcaster.send(crew, outgoing.buffers, deadline_seconds=SECONDS).result(SECONDS)
        assert "checksum mismatch in buckets [0]" in other.ask(wait=wrong)["failed"]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_receiver_that_dies_in_an_nccl_broadcast_leaves_the_sender_whole() -> None:
    outgoing = outgoing_on("cuda:0", megabytes=4096)  # more than NCCL takes without a receiver
    broadcaster = Broadcaster(host="127.0.0.1", incarnation=1, device=outgoing.device)
    with receiver_on("cuda:1") as other:
        crew = broadcaster.crew("nccl", [Receiving("server")])
        other.open(begin(outgoing, "nccl", version=1, crew=crew))
        broadcaster.send(crew, outgoing.buffers, deadline_seconds=SECONDS).result(SECONDS)
        other.ask(wait=outgoing.checksums)
        other.process.kill()
        other.process.wait()
        began = time.monotonic()
        sending = broadcaster.send(crew, outgoing.buffers, deadline_seconds=2.0)
        with pytest.raises(RuntimeError, match="aborted"):
            sending.result(SECONDS)
        assert time.monotonic() - began < 5.0
    assert float(torch.ones(1000, device="cuda:0").sum()) == 1000, "the card is free"
    with receiver_on("cuda:1") as other:
        broadcaster.forget(crew)
        crew = broadcaster.crew("nccl", [Receiving("server")])
        other.open(begin(outgoing, "nccl", version=2, crew=crew))
        broadcaster.send(crew, outgoing.buffers, deadline_seconds=SECONDS).result(SECONDS)
        assert other.ask(wait=outgoing.checksums) == {"sums": sums_of(outgoing)}


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_receiver_can_be_aborted_while_it_waits_for_a_sender_that_never_comes() -> None:
    outgoing = outgoing_on("cuda:0")
    broadcaster = Broadcaster(host="127.0.0.1", incarnation=1, device=outgoing.device)
    with receiver_on("cuda:1") as other:
        crew = broadcaster.crew("nccl", [Receiving("server")])
        other.open(begin(outgoing, "nccl", version=1, crew=crew))
        broadcaster.send(crew, outgoing.buffers, deadline_seconds=SECONDS).result(SECONDS)
        other.ask(wait=outgoing.checksums)
        other.open(begin(outgoing, "nccl", version=2, crew=crew))
        time.sleep(0.5)  # its kernel waits on the GPU now; nothing on this side can be looked at
        assert other.ask(drop=True) == {"dropped": True}
        assert other.ask(wait=[])["failed"] == "no push is open"


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_ipc_brings_version_after_version_on_one_card() -> None:
    outgoing = outgoing_on("cuda:0")
    with receiver_on("cuda:0") as other:
        for version in (1, 2, 3):
            other.open(begin(outgoing, "ipc", version=version))
            assert other.ask(wait=outgoing.checksums) == {"sums": sums_of(outgoing)}


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("kind", ["gloo", "disk"])
def test_host_transports_reach_a_card(kind: str, tmp_path: Path) -> None:
    outgoing = outgoing_on("cuda:0")
    broadcaster = Broadcaster(host="127.0.0.1", incarnation=1, device=outgoing.device)
    with receiver_on("cuda:0") as other:
        if kind == "disk":
            outgoing.write(tmp_path / "version_1.safetensors")
            other.open(begin(outgoing, kind, version=1, path=str(tmp_path / "version_1.safetensors")))
        else:
            crew = broadcaster.crew("gloo", [Receiving("server")])
            other.open(begin(outgoing, kind, version=1, crew=crew))
            broadcaster.send(crew, outgoing.on_host(), deadline_seconds=SECONDS).result(SECONDS)
        assert other.ask(wait=outgoing.checksums) == {"sums": sums_of(outgoing)}
