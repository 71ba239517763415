"""What an engine is: requests go in from the event loop, completions come out, weights change between two tokens.

The built-in engine (engines/hf.py) and adapters of vLLM or SGLang all have this face; the
rollout service sees no other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from rollout.sampling import SamplingParams, StopReason, VersionSpan

if TYPE_CHECKING:
    from protos import BeginPushRequest

UpdateMode = Literal["keep", "recompute", "restart"]


class TransferFailed(RuntimeError):
    """A push did not arrive whole; the weights in use were not touched.

    corrupt: it arrived, and was not what was sent.
    """

    def __init__(self, message: str, *, corrupt: bool = False) -> None:
        super().__init__(message)
        self.corrupt = corrupt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One sample to generate.

    request_id: unique among the unfinished requests of an engine.
    prompt_ids: token ids; requests of one group hold equal ones and then share the prefill.
    seed: 0 <= seed < 2**64; with the index of a token it fixes the uniform number that the token is drawn with.
    """

    request_id: int
    prompt_ids: tuple[int, ...] | npt.NDArray[np.int32]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One generated sample.

    token_ids: (n,), the end-of-sequence token or the token that completed a stop string included.
    logprobs: (n,), natural logarithm, under the distribution that was sampled (behaviour logprobs).
    spans: which policy_version made which tokens; the numbers of tokens sum to n.
    text: all token ids decoded, special tokens left out; None without a tokenizer.
    """

    request_id: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    stop_reason: StopReason
    text: str | None


class Engine(Protocol):
    """A generation engine. All methods are called from one event loop; only one task awaits `finished`."""

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next token is sampled with."""

    @property
    def healthy(self) -> bool:
        """False once generation has failed; nothing more will come out."""

    @property
    def vocab_size(self) -> int:
        """Prompt token ids must be below this."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response, in tokens."""

    async def start(self) -> None:
        """Be ready to generate. ValueError where the model cannot be served by this engine."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests in this order. ValueError names the first bad request; then none of them is queued."""

    async def finished(self) -> list[Completion]:
        """Wait for at least one completion and return all that are there. Raises RuntimeError if generation failed."""

    async def abort(self, request_ids: Iterable[int]) -> None:
        """End these samples: each comes out of `finished` as aborted, with its tokens so far. Unknown ids: ignored."""

    async def pause(self) -> None:
        """Sample no more tokens after the one under way; unfinished samples keep their place."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def sleep(self) -> None:
        """Give the device's memory back: no token is sampled until `wake`, and the KV cache is gone.

        Unfinished samples keep their tokens, where the engine can; ValueError where it cannot, or cannot sleep at all.
        A push may be opened and arrive meanwhile; it is swapped in after `wake`.
        """

    async def wake(self) -> None:
        """Take the memory again, with the weights of before, and go on."""

    @property
    def receivers(self) -> int:
        """Processes that receive weights: the ranks that the engine takes in a broadcast."""

    @property
    def transports(self) -> tuple[str, ...]:
        """Of nccl, ipc, gloo and disk: how weights can reach it."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs whose memory holds the weights; empty on a CPU."""

    async def open_push(self, request: "BeginPushRequest") -> None:
        """Begin to receive into staging memory while generation goes on; returns when every receiver has begun.

        The manifest is whole; receiver i has rank `request.rendezvous.rank + i`.
        """

    async def await_push(self, checksums: Sequence[int]) -> None:
        """Wait until the open push has arrived and is what was sent; TransferFailed, at the latest by its deadline."""

    async def swap(self, version: int, mode: UpdateMode) -> float:
        """Take what has arrived as the weights, between two tokens; later tokens carry `version`.

        Returns the seconds that decoding stood still. ValueError, and nothing touched, if a name, shape or dtype does
        not fit. Parameters that were not sent stay.
        mode: keep the KV cache of unfinished samples, recompute it under the new weights, or restart the samples.
        """

    async def drop_push(self) -> None:
        """Forget an open push and its group; the weights in use stay."""

    def parameters(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype such as float32, shape) of each parameter; tied ones once."""

    async def close(self) -> None:
        """Stop generation and free its thread; unfinished samples vanish."""


def check_request(request: Request, *, vocab_size: int, max_model_len: int) -> None:
    """ValueError, naming the request, if it cannot be generated."""
    prompt_ids = request.prompt_ids
    name = f"request {request.request_id}"
    if len(prompt_ids) == 0:
        raise ValueError(f"{name}: the prompt is empty")
    total = len(prompt_ids) + request.sampling.max_tokens
    if total > max_model_len:
        raise ValueError(
            f"{name}: prompt of {len(prompt_ids)} tokens plus max_tokens {request.sampling.max_tokens} "
            f"is over max_model_len {max_model_len}"
        )
    lowest, highest = _extremes(prompt_ids)
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(f"{name}: token id {lowest if lowest < 0 else highest} is not in [0, {vocab_size})")
    if not 0 <= request.seed < 1 << 64:
        raise ValueError(f"{name}: seed {request.seed} is not in [0, 2**64)")


def _extremes(prompt_ids: tuple[int, ...] | npt.NDArray[np.int32]) -> tuple[int, int]:
    if isinstance(prompt_ids, tuple):
        return min(prompt_ids), max(prompt_ids)
    return int(prompt_ids.min()), int(prompt_ids.max())
