"""vLLM behind the face of engine.py: AsyncLLM here, its engine core and workers in processes of their own.

Requests and completions pass through vllm_queue.py; weights arrive in the workers (vllm_link.py, vllm_transfer.py)
while decoding goes on, and are taken over while it stands still (`swap`).
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from protos import BeginPushRequest
from rollout.config import RolloutConfig
from rollout.engine import Completion, Request, TransferFailed, UpdateMode, check_request
from rollout.engines.vllm_args import engine_args, set_environment
from rollout.engines.vllm_links import Links
from rollout.engines.vllm_model import ModelFacts, read_facts
from rollout.engines.vllm_plugin import register
from rollout.weights import verify

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.engines.vllm_core import VllmCore
    from rollout.engines.vllm_queue import SampleQueue

logger = logging.getLogger(__name__)
WATCH_SECONDS = 0.25
JOIN_SECONDS = 30.0


class VllmEngine:
    """An `Engine`. vLLM's processes start in `start` and end in `close`."""

    def __init__(self, path: str, facts: ModelFacts, config: RolloutConfig) -> None:
        self._path, self._facts, self._config = path, facts, config
        vllm = config.vllm
        self._receivers = vllm.tensor_parallel_size * vllm.data_parallel_size * _pipeline_stages(config)
        self._core: VllmCore | None = None
        self._queue: SampleQueue | None = None
        self._links: Links | None = None
        self._watching: asyncio.Task[None] | None = None
        self._done: list[Completion] = []
        self._news = asyncio.Event()
        self._error: BaseException | None = None
        self._swapping = asyncio.Lock()
        self._deadline = 0.0
        self._paused = self._weights_asleep = self._push_open = False

    @classmethod
    def from_pretrained(cls, path: str, config: RolloutConfig) -> "VllmEngine":
        """A folder or a hub id. Blocks. ValueError where a setting or the model does not fit this vLLM."""
        set_environment(config)
        facts = read_facts(path)
        engine_args(path, config, own_dtype=facts.dtype)
        return cls(path, facts, config)

    # What it is.

    @property
    def policy_version(self) -> int:
        """Of the weights that the next token is sampled with; 0 is the start model."""
        return self._queue.policy_version if self._queue is not None else 0

    @property
    def healthy(self) -> bool:
        """Whether the engine is started, not closed, and its processes live."""
        return self._error is None and self._core is not None and not self._core.dead

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding."""
        return int(self._running().llm.model_config.get_vocab_size())

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response, in tokens."""
        return int(self._running().llm.model_config.max_model_len)

    @property
    def receivers(self) -> int:
        """Workers: tensor parallel times data parallel (times pipeline) size."""
        return self._receivers

    @property
    def transports(self) -> tuple[str, ...]:
        """All that the device allows; one card is one process, so memory is shared with one worker only."""
        return ("nccl", "ipc", "gloo", "disk") if self.gpus else ("gloo", "disk")

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the workers' cards; empty on a CPU."""
        return self._links.gpus if self._links is not None else ()

    def parameters(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of each parameter by its Hugging Face name; tied ones once."""
        return [(name, self._dtype, shape) for name, shape in self._facts.shapes.items()]

    @property
    def _dtype(self) -> str:
        return str(self._running().llm.model_config.dtype).removeprefix("torch.")

    # Life.

    async def start(self) -> None:
        """Start vLLM's processes and wait for their workers. ValueError where the device is not this vLLM's."""
        from rollout.engines.vllm_core import VllmCore
        from rollout.engines.vllm_queue import SampleQueue

        register()
        self._links = Links(self._receivers)
        await self._links.listen()
        try:
            self._core = VllmCore(await asyncio.to_thread(self._make_llm))
            await self._links.ready(seconds=JOIN_SECONDS)
        except BaseException:
            await self.close()
            raise
        self._queue = SampleQueue(
            self._core,
            end_ids=self._facts.end_ids,
            per_sample_seeds=self._config.vllm.per_sample_seeds,
            done=self._deliver,
            fail=self._fail,
        )
        self._watching = asyncio.create_task(self._watch(), name="offbeat-vllm-watch")

    def _make_llm(self) -> "AsyncLLM":
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        asked, given = self._config.device, current_platform.device_type
        if asked not in ("auto", given):
            raise ValueError(f"rollout.device is {asked}, and this vLLM runs on {given or 'nothing that is here'}")
        return AsyncLLM.from_engine_args(engine_args(self._path, self._config, own_dtype=self._facts.dtype))

    async def close(self) -> None:
        """End vLLM's processes; a task in `finished` gets RuntimeError."""
        self._fail(RuntimeError("the engine is closed"))
        if self._watching is not None:
            self._watching.cancel()
        if self._queue is not None:
            await self._queue.close()
        if self._core is not None:
            await self._core.close()
        if self._links is not None:
            await self._links.close()

    async def _watch(self) -> None:
        """An idle engine waits for no message: only a look at its processes tells that one has died."""
        while self._error is None:
            if self._running().dead:
                self._fail(RuntimeError("a process of vLLM has ended"))
            await asyncio.sleep(WATCH_SECONDS)

    # Generation.

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; ValueError, and none is queued, if one is invalid or its id is unfinished."""
        queue = self._samples()
        seen: set[int] = set()
        for request in requests:
            check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
            if request.request_id in queue or request.request_id in seen:
                raise ValueError(f"request {request.request_id}: a request of this id is unfinished")
            seen.add(request.request_id)
        queue.submit(requests)

    async def finished(self) -> list[Completion]:
        """All completions since the last call, at least one."""
        while not self._done:
            self._raise_if_failed()
            self._news.clear()
            await self._news.wait()
        done = list(self._done)
        texts = await asyncio.to_thread(self._texts, [one.token_ids.tolist() for one in done])
        del self._done[: len(done)]
        return [dataclasses.replace(one, text=text) for one, text in zip(done, texts, strict=True)]

    async def abort(self, request_ids: Iterable[int]) -> None:
        """End samples between two tokens; they come out of `finished` as aborted. Unknown ids are ignored."""
        await self._samples().abort(list(request_ids))

    async def pause(self) -> None:
        """Return once no token is being sampled; none will be until `resume`."""
        async with self._swapping:
            await self._running().pause()
            self._paused = True

    async def resume(self) -> None:
        """Go on after `pause`."""
        async with self._swapping:
            self._paused = False
            await self._running().resume()

    def _texts(self, sequences: list[list[int]]) -> list[str]:
        texts: list[str] = self._facts.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        return texts

    def _deliver(self, completion: Completion) -> None:
        self._done.append(completion)
        self._news.set()

    # A push.

    async def open_push(self, request: BeginPushRequest) -> None:
        """Begin to receive in every worker. ValueError if the manifest does not fit the model; TransferFailed."""
        whole = not self.gpus  # on a CPU whole layers are prepared anew
        mistakes = self._facts.mistakes(request.manifest, dtype=self._dtype, whole=whole)
        if self._weights_asleep and request.manifest.low_rank:
            mistakes.append("an adapter is not enough after sleep level 2: push it merged")
        if mistakes:
            raise ValueError("weights refused: " + "; ".join(mistakes[:10]))
        self._deadline = time.monotonic() + request.deadline_seconds
        self._push_open = True
        await self._workers().open(request.SerializeToString())

    async def await_push(self, checksums: Sequence[int]) -> None:
        """Wait until every worker has what was sent; TransferFailed, at the latest by the push's deadline."""
        for found in await self._workers().arrived(seconds=max(self._deadline - time.monotonic(), 0.0) + 1.0):
            verify(found, checksums)

    async def swap(self, version: int, mode: UpdateMode) -> float:
        """Take what has arrived as the weights between two tokens; the seconds that decoding stood still."""
        async with self._swapping:
            core, queue = self._running(), self._samples()
            if not self._weights_asleep:
                await core.pause(clear_cache=mode == "recompute")
            began = time.monotonic()
            await self._install()
            self._push_open = False
            await queue.turn(version, mode)
            if self._weights_asleep:
                await core.llm.wake_up(tags=["kv_cache"])
                self._weights_asleep = False
            if not self._paused:
                await core.resume()
            return time.monotonic() - began

    async def drop_push(self) -> None:
        """Forget an open push and its group in every worker; the weights in use stay."""
        async with self._swapping:
            await self._workers().drop()
            self._push_open = False

    async def _install(self) -> None:
        """Weights that were half taken are no weights: the engine fails."""
        try:
            wrong = [text for text in await self._running().call("offbeat_swap") if text]
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            self._fail(RuntimeError(f"new weights could not be taken: {wrong[0]}"))
            self._raise_if_failed()

    # Sharing one card.

    async def sleep(self, level: int = 1) -> None:
        """Give the cards' memory back: 1 keeps the weights in the host's memory, 2 forgets them.

        Unfinished samples stay, and are prefilled again on waking. On a CPU decoding only stops. ValueError on a card
        without vllm.enable_sleep_mode.
        """
        if self.gpus and not self._config.vllm.enable_sleep_mode:
            raise ValueError("sleep needs vllm.enable_sleep_mode")
        async with self._swapping:
            await self._running().pause(clear_cache=True)
            if not self._push_open:
                await self._workers().release()
            if self.gpus:
                await self._running().llm.sleep(level=level, mode="keep")
                self._weights_asleep = level > 1

    async def wake(self) -> None:
        """Take the memory again and go on; after level 2, which leaves no weights, with the next `swap`."""
        async with self._swapping:
            if self.gpus:
                await self._running().llm.wake_up(tags=["weights"] if self._weights_asleep else None)
            if self._paused:
                await self._running().pause()
            elif not self._weights_asleep:
                await self._running().resume()

    # Failing.

    def _running(self) -> "VllmCore":
        if self._core is None:
            raise RuntimeError("the engine is not started")
        return self._core

    def _samples(self) -> "SampleQueue":
        self._raise_if_failed()
        if self._queue is None:
            raise RuntimeError("the engine is not started")
        return self._queue

    def _workers(self) -> Links:
        if self._error is not None:
            raise TransferFailed(f"generation has stopped: {self._error}")
        if self._links is None:
            raise RuntimeError("the engine is not started")
        return self._links

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"generation has stopped: {self._error}") from self._error

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._news.set()


def _pipeline_stages(config: RolloutConfig) -> int:
    stages = config.vllm.engine_args.get("pipeline_parallel_size", 1)
    return stages if isinstance(stages, int) else 1
