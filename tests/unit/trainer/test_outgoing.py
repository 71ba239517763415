"""Streams and snapshots of the same weights are the same bytes; a stream overlaps and spares what is on its way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # torch's stubs leave them out

from protos.groups import RING, GlooGroup
from protos.tensors import checksums, make_buffers, named_views
from trainer.pushes.outgoing import Outgoing

SECONDS = 10.0


class Tied(nn.Module):
    """An embedding larger than a bucket, used twice; odd sizes that leave gaps; two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(7, 9) for _ in range(6))
        self.scale = nn.Parameter(torch.randn(5).bfloat16())
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight


def outgoing(*, streamed: bool, dtype: torch.dtype | None = None) -> Outgoing:
    made = Outgoing(Tied().named_parameters(), bucket_bytes=600, dtype=dtype, streamed=streamed)
    made.pack()
    return made


def two_ranks() -> tuple[GlooGroup, GlooGroup]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=SECONDS))
    groups: dict[int, GlooGroup] = {}

    def join(rank: int) -> None:
        place = PrefixStore("x", store)
        groups[rank] = GlooGroup(place, rank=rank, world_size=2, host="127.0.0.1", deadline_seconds=SECONDS)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join(SECONDS)
    return groups[0], groups[1]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_stream_and_a_snapshot_are_the_same_bytes_at_the_receiver(dtype: torch.dtype | None) -> None:
    snapshot, stream = outgoing(streamed=False, dtype=dtype), outgoing(streamed=True, dtype=dtype)
    assert max(bucket.num_bytes for bucket in snapshot.plan) > 600 and len(snapshot.plan) > 3
    names = [slot.name for bucket in stream.plan for slot in bucket.slots]
    assert "embed.weight" in names and "head.weight" not in names, "tied parameters are sent once"
    assert stream.hash() == "" and stream.buffers == []
    sender, receiver = two_ranks()
    for sent in (snapshot, stream):
        landing = make_buffers(sent.plan, device=torch.device("cpu"))
        arrival = threading.Thread(target=receiver.broadcast, args=(landing,), kwargs={"deadline_seconds": SECONDS})
        arrival.start()
        sender.broadcast(sent.to_send("gloo"), deadline_seconds=SECONDS)
        arrival.join(SECONDS)
        assert checksums(landing) == sent.checksums == snapshot.checksums
        for name, tensor in named_views(sent.plan, landing):
            assert torch.equal(tensor, snapshot.named_views()[name])
    assert stream.hash() == snapshot.hash() != ""


def test_a_new_version_has_no_checksums_until_it_was_streamed_or_concluded() -> None:
    model = Tied()
    stream = Outgoing(model.named_parameters(), bucket_bytes=600, streamed=True)
    stream.pack()
    stream.conclude()
    before = stream.hash()
    with torch.no_grad():
        model.scale.add_(1)
    stream.pack()
    assert stream.hash() == ""
    stream.conclude()
    assert stream.hash() not in ("", before)


def test_a_bucket_is_filled_while_the_one_before_is_broadcast_and_its_memory_waits_for_the_end() -> None:
    """The receiver takes bucket k when k + 1 is being filled, or never: without an overlap nothing would arrive."""
    sender, receiver = two_ranks()
    count = 6
    filling = [threading.Event() for _ in range(count + 1)]
    begun: list[int] = []
    taken: list[int] = []
    landed = [torch.zeros(64, dtype=torch.uint8) for _ in range(count)]

    def stream() -> Iterator[Tensor]:
        ring = [torch.zeros(64, dtype=torch.uint8) for _ in range(RING)]
        for at in range(count):
            begun.append(at)
            assert at < RING or at - RING in taken, "this memory is still on its way"
            filling[at].set()
            yield ring[at % RING].fill_(at + 1)
        filling[count].set()

    def take() -> Iterator[Tensor]:
        for at, buffer in enumerate(landed):
            assert filling[at + 1].wait(SECONDS)
            taken.append(at)
            yield buffer

    def receive() -> None:
        for buffer in take():
            receiver.broadcast([buffer], deadline_seconds=SECONDS)

    arrival = threading.Thread(target=receive)
    arrival.start()
    sender.broadcast(stream(), deadline_seconds=SECONDS)
    arrival.join(SECONDS)
    assert begun == taken == list(range(count))
    assert [set(buffer.tolist()) for buffer in landed] == [{at + 1} for at in range(count)]


def test_a_stream_that_is_left_early_sets_no_checksums_and_lets_the_next_one_begin() -> None:
    stream = outgoing(streamed=True)
    filled = stream.filled()
    next(filled)
    filled.close()
    assert stream.checksums == []
    assert len(list(stream.filled())) == len(stream.plan) == len(stream.checksums)
