"""Two FSDP2 ranks on GPUs stream versions by NCCL to a receiver on a third GPU."""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from protos import BeginPushRequest
from tests.gpu.sharded_sender import SECONDS, make_model, next_version, outgoing_of
from tests.gpu.test_transfers import Other, receiver_on
from trainer.pushes.outgoing import Outgoing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs"),
]


@contextmanager
def trainer(folder: Path, *, versions: int) -> Iterator[Other]:
    """Rank 0 of two, which is told what to do."""
    command = [sys.executable, "-m", "tests.gpu.sharded_sender"]
    arguments = ["2", str(folder), str(versions)]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen([*command, "1", *arguments]) as other,
        subprocess.Popen([*command, "0", *arguments], stdin=pipe, stdout=pipe, text=True) as lead,
    ):
        try:
            yield Other(lead)
            assert lead.stdin is not None
            lead.stdin.close()
            assert (lead.wait(timeout=SECONDS), other.wait(timeout=SECONDS)) == (0, 0)
        finally:
            lead.kill()
            other.kill()


def unsharded(version: int) -> Outgoing:
    """What the ranks stream, made on the host by one process without shards."""
    model = make_model()
    for step in range(1, version + 1):
        next_version(model, step)
    outgoing = outgoing_of(model, streamed=False)
    outgoing.pack()
    return outgoing


def begin(lead: Other, receiver: Other, version: int) -> None:
    request = BeginPushRequest.FromString(base64.b64decode(lead.ask(begin=version)["request"]))
    receiver.open(request)


def assert_arrives(lead: Other, receiver: Other, version: int) -> None:
    """Bit for bit: the receiver's checksums are those of the unsharded model."""
    begin(lead, receiver, version)
    expected = unsharded(version)
    assert lead.ask(send=SECONDS) == {"failed": "", "checksums": expected.checksums}
    sums = receiver.ask(wait=expected.checksums)["sums"]
    wanted = {name: float(tensor.double().sum()) for name, tensor in expected.named_views().items()}
    assert sums == pytest.approx(wanted, rel=1e-9, abs=1e-6)


def test_shards_on_two_gpus_are_streamed_to_a_third(tmp_path: Path) -> None:
    with receiver_on("cuda:2") as receiver, trainer(tmp_path, versions=3) as lead:
        for version in (1, 2, 3):
            assert_arrives(lead, receiver, version)


def test_a_receiver_that_dies_in_a_stream_leaves_the_ranks_together(tmp_path: Path) -> None:
    with trainer(tmp_path, versions=3) as lead:
        with receiver_on("cuda:2") as receiver:
            assert_arrives(lead, receiver, 1)
            begin(lead, receiver, 2)
            receiver.process.kill()
            receiver.process.wait()
            began = time.monotonic()
            assert "aborted" in lead.ask(send=2.0)["failed"]
            assert time.monotonic() - began < 10.0
        with receiver_on("cuda:2") as receiver:
            assert_arrives(lead, receiver, 3)
