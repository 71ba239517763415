"""Two trainer processes with FSDP2 shards stream versions to a real rollout server, by gRPC and Gloo."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protos.groups import GlooGroup
from services import faults
from services.config import Config
from services.rollout import RolloutService
from tests.integration.conftest import SHAPE
from tests.integration.test_push import servers, status_of
from tests.integration.trainer_rank import BUCKET_BYTES, changed_model
from trainer.pushes.outgoing import Outgoing
from trainer.small.tiny import make_tiny_qwen3

MakeConfig = Callable[..., Config]
DEADLINE_SECONDS = 20.0
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks hold equally many rows of most parameters, and unequally many of gate_proj and up_proj."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), seed=1, shape=replace(SHAPE, intermediate_size=47))


async def run_ranks(
    folder: Path, model: Path, service: RolloutService, *, transports: list[str], die_at_fill: int = 0
) -> dict[str, Any]:
    """What rank 0 says of its pushes."""
    spec = {
        "folder": str(folder),
        "model": str(model),
        "address": service.address,
        "transports": transports,
        "deadline_seconds": DEADLINE_SECONDS,
        "die_at_fill": die_at_fill,
    }
    ranks = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.integration.trainer_rank", json.dumps(spec | {"rank": rank})),
            stdout=asyncio.subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        async with asyncio.timeout(120):
            (out, _), _ = await asyncio.gather(*(rank.communicate() for rank in ranks))
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
                await rank.wait()
    return dict(json.loads(out))


def unsharded(model: Path, *, version: int) -> Outgoing:
    """What the ranks stream, made by one process without shards."""
    whole = changed_model(model, seed=7)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(2.0 ** (version - 1))
    outgoing = Outgoing(whole.named_parameters(), bucket_bytes=BUCKET_BYTES)
    outgoing.pack()
    return outgoing


def served_weights(service: RolloutService) -> dict[str, Tensor]:
    return dict(service.engine._model.named_parameters())  # type: ignore[attr-defined]


async def assert_serves(service: RolloutService, expected: Outgoing, version: int) -> None:
    """Asked of it, and looked up in its engine, bit for bit."""
    status = await status_of(service)
    assert (status.serving, status.policy_version, status.weights_hash) == (True, version, expected.hash())
    served = served_weights(service)
    wanted = expected.named_views()
    assert served.keys() == wanted.keys()
    assert all(torch.equal(served[name], wanted[name]) for name in wanted)


def hold_back(monkeypatch: pytest.MonkeyPatch, events: Path, *, buckets: int) -> None:
    """The server takes bucket k when the trainer has begun to fill k + 1: without an overlap it would wait for ever."""
    broadcast = GlooGroup.broadcast

    def held(this: GlooGroup, buffers: Iterable[Tensor], *, deadline_seconds: float) -> None:
        def take() -> Iterator[Tensor]:
            for at, buffer in enumerate(buffers):
                give_up = time.monotonic() + deadline_seconds
                while at + 1 < buckets and f"fill {at + 1}\n" not in events.read_text():
                    assert time.monotonic() < give_up
                    time.sleep(0.001)
                yield buffer

        broadcast(this, take(), deadline_seconds=deadline_seconds)

    monkeypatch.setattr(GlooGroup, "broadcast", held)


async def test_shards_are_gathered_while_the_bucket_before_travels(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unsharded(model_folder, version=1)
    buckets = len(expected.plan)
    assert buckets > 3
    hold_back(monkeypatch, tmp_path / "events-0", buckets=buckets)
    async with servers(make_config, tmp_path, 1) as (service,):
        told = await run_ranks(tmp_path, model_folder, service, transports=["gloo"])
        assert told["committed"] == [["rollout-0"]] and told["hashes"] == [expected.hash()]
        await assert_serves(service, expected, 1)
    events = (tmp_path / "events-0").read_text().split("\n")
    at = {event: events.index(event) for event in events}
    for bucket in range(buckets - 1):
        assert at[f"fill {bucket + 1}"] < at[f"sent {bucket}"], "bucket k + 1 is filled while k travels"
    for bucket in range(buckets - 2):
        assert at[f"sent {bucket}"] < at[f"fill {bucket + 2}"], "the memory of bucket k is free for k + 2"


async def test_every_rank_takes_part_again_when_a_push_is_tried_again(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    faults.arm("rollout-0:push.commit@2=flip")
    expected = unsharded(model_folder, version=3)
    async with servers(make_config, tmp_path, 1) as (service,):
        told = await run_ranks(tmp_path, model_folder, service, transports=["gloo", "gloo", "disk"])
        assert told["committed"] == [["rollout-0"]] * 3
        assert told["hashes"][2] == expected.hash() and len(set(told["hashes"])) == 3
        await assert_serves(service, expected, 3)
    for rank in (0, 1):
        fills = (tmp_path / f"events-{rank}").read_text().count("fill")
        assert fills == 4 * len(expected.plan), "three versions, one of them twice"


async def test_a_rank_that_dies_in_the_gather_ends_the_push_and_the_server_keeps_its_weights(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    expected = unsharded(model_folder, version=1)
    async with servers(make_config, tmp_path, 1) as (service,):
        told = await run_ranks(
            tmp_path, model_folder, service, transports=["gloo", "gloo"], die_at_fill=len(expected.plan) + 3
        )
        assert told["committed"] == [["rollout-0"]], "the first version arrived"
        assert "onnection" in told["failed"] and told["seconds"] < DEADLINE_SECONDS
        await assert_serves(service, expected, 1)
