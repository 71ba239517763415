"""A version in flat buckets, ready to be sent: a snapshot of all of them, or a stream through two buffers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from protos import LowRankUpdate, Manifest, SharedBuffer, TensorSpec
from protos.buckets import ALIGNMENT_BYTES, Bucket, make_manifest, plan_buckets, weights_hash
from protos.groups import RING
from protos.ipc import share
from protos.tensors import WIRE_DTYPES, checksum_of, fetch, make_buffers, named_views
from trainer.adapters.merging import Weight, is_sharded
from trainer.pushes.gather import Fill, GatherFailed

CPU = torch.device("cpu")
EARLIER_SECONDS = 10.0
"""For a stream that broke to come to its end before the next one begins."""


class Outgoing:
    """The buckets of a model, on its own device. Every trainer rank makes one; rank 0 sends. The others help to gather
    sharded parameters; where parameters are whole they hold, fill and await nothing.

    A snapshot is filled by `pack` and may be sent until the next `pack`, while the parameters change. Streamed buckets
    are filled while they are sent, so the parameters must hold still, and the checksums are known at the end only.
    dtype: what floating point parameters are sent as; None sends them as they are.
    low_rank: what a receiver makes of the parameters, where they are factors of its weights.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Weight]],
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        streamed: bool = False,
        low_rank: Iterable[LowRankUpdate] = (),
    ) -> None:
        tensors = dict(parameters)
        specs = [
            TensorSpec(name=name, dtype=WIRE_DTYPES[dtype or tensor.dtype], shape=tensor.shape)
            for name, tensor in tensors.items()
        ]
        self.streamed = streamed
        self.device = next(iter(tensors.values())).device
        self.manifest: Manifest = make_manifest(specs, bucket_bytes=bucket_bytes, low_rank=low_rank)
        self.plan = plan_buckets(self.manifest)
        self._sharded = any(is_sharded(tensor) for tensor in tensors.values())
        self._leads = not dist.is_initialized() or dist.get_rank() == 0
        filled = self.plan if self._leads or self._sharded else ()
        self.buffers: list[Tensor] = [] if streamed or not self._leads else make_buffers(self.plan, device=self.device)
        places = self.buffers or ring(filled, bucket_bytes=bucket_bytes, device=self.device)
        self._fills = [
            Fill(bucket, [tensors[slot.name] for slot in bucket.slots], place, device=self.device)
            for bucket, place in zip(filled, places, strict=True)
        ]
        self.checksums: list[int] = []
        self._filling = threading.Lock()
        self._on_host: list[Tensor] | None = None
        self._shared: list[SharedBuffer] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.plan)

    def hash(self) -> str:
        """Names the parameters; a receiver computes the same. Empty for a version that was not streamed yet."""
        return weights_hash(self.manifest.hash, self.checksums) if self.checksums else ""

    # Filling.

    def pack(self) -> None:
        """The parameters are new: a snapshot copies them now, a stream will when it is sent."""
        self._on_host = None
        if self.streamed:
            self.checksums = []
        else:
            exhaust(self.filled())

    def filled(self) -> Generator[Tensor, None, None]:
        """Bucket after bucket, filled on the current stream. Whoever asks for one no longer needs the one before last.

        With shards a collective: the other ranks run it by `follow`, to the end even where rank 0 turns away early.
        """
        with self._alone():
            if self.streamed and self._leads:
                self._announce(more=True)
            after_the_step(self.device)
            sums: list[Tensor] = []
            held: deque[Tensor] = deque(maxlen=RING)
            fills = iter(self._fills)
            try:
                for fill in fills:
                    held.append(fill())
                    sums.append(checksum_of(held[-1]))
                    yield held[-1]
            except GeneratorExit:
                if self._sharded:
                    for fill in fills:
                        fill()
                raise
            self.checksums = fetch(sums)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._filling.acquire(timeout=EARLIER_SECONDS):
            raise GatherFailed("an earlier stream has not come to its end: a trainer rank hangs")
        try:
            yield
        finally:
            self._filling.release()

    # All ranks together.

    def conclude(self) -> None:
        """Rank 0, when a push is over: the checksums are known, whoever it was sent to, and the others are let go."""
        if self.streamed:
            if not self.checksums:
                exhaust(self.filled())
            self._announce(more=False)

    def follow(self) -> None:
        """The other ranks, beside a push of rank 0: take part in every stream, until it concludes."""
        while self.streamed and self._announce():
            exhaust(self.filled())

    def _announce(self, *, more: bool = False) -> bool:
        """Rank 0 says whether a stream comes; the others hear it."""
        if not self._sharded:
            return more
        said = torch.tensor([more], dtype=torch.uint8, device=self.device)
        try:
            dist.broadcast(said, 0)
        except RuntimeError as error:
            raise GatherFailed(f"{type(error).__name__}: {str(error)[:300]}") from error
        return more if self._leads else bool(said.item())

    # Sending.

    def to_send(self, kind: str) -> Iterable[Tensor]:
        """The buckets for a broadcast of this kind: nccl takes them where they lie, gloo from host memory."""
        if not self.streamed:
            return self.buffers if kind == "nccl" else self.on_host()
        return self.filled() if kind == "nccl" or self.device == CPU else self._filled_on_host()

    def _filled_on_host(self) -> Generator[Tensor, None, None]:
        with closing(self.filled()) as filled:
            for buffer in filled:
                yield buffer.to(CPU)

    def on_host(self) -> list[Tensor]:
        """All buckets in host memory, for transports that do not reach a GPU."""
        if self.streamed:
            return [buffer.to(CPU, copy=True) for buffer in self.filled()]
        if self.device == CPU:
            return self.buffers
        if self._on_host is None:
            self._on_host = [buffer.to(CPU) for buffer in self.buffers]
        return self._on_host

    def named_views(self) -> dict[str, Tensor]:
        """The parameters in a snapshot by name."""
        return dict(named_views(self.plan, self.buffers))

    def shared(self) -> list[SharedBuffer]:
        """Handles to a snapshot for another process on the same GPU; the same ones push after push."""
        if self._shared is None:
            self._shared = share(self.buffers)
        return self._shared

    def write(self, path: Path) -> None:
        """Write the parameters as safetensors; the file appears whole or not at all."""
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        save_file({name: view.contiguous() for name, view in named_views(self.plan, self.on_host())}, scratch)
        scratch.replace(path)


def ring(plan: Iterable[Bucket], *, bucket_bytes: int, device: torch.device) -> list[Tensor | None]:
    """A place for each bucket in one of RING buffers; none for a parameter that is larger than a bucket."""
    limit = -(-bucket_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    sizes = [bucket.num_bytes for bucket in plan]
    largest = max((size for size in sizes if size <= limit), default=0)
    buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(RING)]
    return [buffers[at % RING] if size <= limit else None for at, size in enumerate(sizes)]


def after_the_step(device: torch.device) -> None:
    """On a GPU the current stream reads what the default stream has written."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))


def exhaust(buckets: Iterable[Tensor]) -> None:
    for _ in buckets:
        pass
