"""SGLang (0.5.17 and later) behind the face of engine.py: token ids in, tokens with logprobs and versions out.

The model lives in SGLang's scheduler processes (sglang_worker.py, sglang_push.py); this process talks to them through
SGLang's own engine (sglang_host.py). Weights are received there, by our receiver, while decoding goes on.
"""

import asyncio
import logging
import signal
from collections.abc import Iterable, Sequence

import torch

from protos import BeginPushRequest
from protos.ipc import gpu_of
from rollout.config import RolloutConfig
from rollout.engine import Completion, Request, TransferFailed, UpdateMode
from rollout.engines.sglang_args import arguments, check_arguments, first_gpu, nccl_environment, set_environment
from rollout.engines.sglang_commands import Reply, Word, pack_checksums, pack_request
from rollout.engines.sglang_host import Host
from rollout.engines.sglang_model import Outline, read_outline
from rollout.engines.sglang_queue import SampleQueue

logger = logging.getLogger(__name__)
COMMAND_SECONDS = 300.0
"""For an answer of SGLang's processes; the first batch, with a minute of Triton's compilation, may lie in it."""
POLL_SECONDS = 0.001


class SglangEngine:
    """An `Engine`. Start it in the main thread: there it takes SIGQUIT, which SGLang's processes send when they die."""

    def __init__(self, path: str, outline: Outline, config: RolloutConfig) -> None:
        self._path = path
        self._outline = outline
        self._config = config
        self._host: Host | None = None
        self._queue: SampleQueue | None = None
        self._version = 0
        self._deadline = 0.0
        self._asleep = False
        self._swapping: asyncio.Future[float] | None = None

    @classmethod
    def from_pretrained(cls, path: str, config: RolloutConfig) -> "SglangEngine":
        """Read what this process needs of the model; SGLang loads it in `start`. ValueError for wrong settings."""
        first_gpu(config.device)
        set_environment()
        check_arguments(config)
        return cls(path, read_outline(path, dtype=config.dtype, max_model_len=config.max_model_len), config)

    @property
    def policy_version(self) -> int:
        """Of the weights that the next batch is launched with; 0 is the start model."""
        return self._version

    @property
    def healthy(self) -> bool:
        """Whether the engine is started, not closed, and none of SGLang's processes has died."""
        return self._queue is not None and not self._queue.failed

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding."""
        return self._outline.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response, in tokens."""
        return self._outline.max_model_len

    @property
    def receivers(self) -> int:
        """One for each tensor-parallel rank."""
        return self._config.sglang.tensor_parallel_size

    @property
    def transports(self) -> tuple[str, ...]:
        """SGLang's processes hold the weights on GPUs."""
        return ("nccl", "ipc", "gloo", "disk")

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs, in the order of the ranks."""
        first = first_gpu(self._config.device)
        return tuple(gpu_of(torch.device("cuda", first + rank)) for rank in range(self.receivers))

    @property
    def nccl_environment(self) -> dict[str, str]:
        """NCCL variables of SGLang's processes; the trainer must have the same."""
        return nccl_environment()

    def parameters(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) as in Hugging Face's model; tied ones once."""
        return self._outline.listed

    # Life.

    async def start(self) -> None:
        """Start SGLang. ValueError where its KV cache is too small for max_model_len, RuntimeError if it fails."""
        with_stops = self._config.sglang.stop_strings and self._outline.tokenizer is not None
        given = arguments(self._path, self._config, max_model_len=self.max_model_len, with_tokenizer=with_stops)
        host = Host(given)
        queue = SampleQueue(host, self._outline, seeded=self._config.sglang.deterministic, with_stops=with_stops)
        self._host, self._queue = host, queue
        self._take_signal(host)
        try:
            host.open(lost=queue.fail_from_thread)
            await asyncio.wrap_future(host.opened)
            self._check_room(host.max_input_len())
        except BaseException:
            await self.close()
            raise

    def _take_signal(self, host: Host) -> None:
        try:
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGQUIT, host.give_up, "SIGQUIT: one of SGLang's processes has failed"
            )
        except (RuntimeError, ValueError) as error:
            logger.warning("a failure of SGLang may end this process", extra={"facts": {"error": str(error)}})

    def _check_room(self, room: int) -> None:
        if room < self.max_model_len:
            raise ValueError(
                f"SGLang's KV cache holds samples of {room} tokens, not of max_model_len {self.max_model_len}: "
                "lower that or raise sglang.mem_fraction_static"
            )

    async def close(self) -> None:
        """End SGLang's processes; a task in `finished` gets RuntimeError."""
        if self._queue is None or self._host is None:
            return
        self._queue.fail(RuntimeError("the engine is closed"))
        await asyncio.to_thread(self._host.close)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)

    async def sleep(self) -> None:
        """Give the cards' memory back, the weights to the host's; unfinished samples are prefilled again on waking.

        ValueError without sglang.enable_memory_saver.
        """
        if not self._config.sglang.enable_memory_saver:
            raise ValueError("sglang.enable_memory_saver is off")
        if not self._asleep:
            await self._command("sleep")
        self._asleep = True

    async def wake(self) -> None:
        """Take the memory again, and go on with the weights as they were."""
        if self._asleep:
            await self._command("wake")
        self._asleep = False

    # Samples.

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; ValueError, and none is queued, if one is invalid or its id is unfinished."""
        self._samples().submit(requests)

    async def finished(self) -> list[Completion]:
        """All completions since the last call, at least one."""
        return await self._samples().finished()

    async def abort(self, request_ids: Iterable[int]) -> None:
        """End samples after the token under way; while paused, those that have begun come out after `resume`."""
        self._samples().abort(request_ids)

    async def pause(self) -> None:
        """Return once no batch will be launched; what the one under way yields comes out after `resume`."""
        await self._command("pause")

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._command("resume")

    # Pushes.

    async def open_push(self, request: BeginPushRequest) -> None:
        """Begin to receive in each of SGLang's processes. ValueError if it does not fit the model."""
        misfits = self._outline.misfits(request.manifest)
        if misfits:
            raise ValueError("weights refused: " + "; ".join(misfits[:5]))
        self._deadline = asyncio.get_running_loop().time() + request.deadline_seconds
        await self._command("open", request=pack_request(request))

    async def await_push(self, checksums: Sequence[int]) -> None:
        """Ask until all ranks have all; TransferFailed."""
        wanted = pack_checksums(checksums)
        while (await self._command("poll", checksums=wanted)).state == "pending":
            if asyncio.get_running_loop().time() > self._deadline:
                raise TransferFailed("the weights have not arrived by the deadline")
            await asyncio.sleep(POLL_SECONDS)

    async def swap(self, version: int, mode: UpdateMode) -> float:
        """Install between two batches, on all ranks at once. RuntimeError, and the engine has failed, if it breaks."""
        self._swapping = asyncio.ensure_future(self._swap(version, mode))
        return await asyncio.shield(self._swapping)  # whoever is cancelled, the version must be noted

    async def drop_push(self) -> None:
        """Forget it in all processes."""
        if self.healthy:
            await self._command("drop")

    async def _swap(self, version: int, mode: UpdateMode) -> float:
        queue = self._samples()
        await self.wake()
        salt = queue.new_salt()
        if mode == "restart":
            queue.restart()
        try:
            reply = await self._command("swap", version=version, mode=mode, salt=salt)
        except RuntimeError as error:  # some tensors may be new and others old
            queue.fail(error)
            raise
        self._version = version
        return float(reply.text)

    # SGLang.

    def _samples(self) -> SampleQueue:
        if self._queue is None:
            raise RuntimeError("the engine is not started")
        return self._queue

    async def _command(self, word: Word, **parameters: bool | int | float | str) -> Reply:
        """Off the event loop. TransferFailed where the processes say that it failed."""
        self._samples().raise_if_failed()
        assert self._host is not None
        reply = await asyncio.to_thread(self._host.command, word, seconds=COMMAND_SECONDS, **parameters)
        if reply.state in ("corrupt", "failed"):
            raise TransferFailed(f"{word}: {reply.text}", corrupt=reply.state == "corrupt")
        return reply
