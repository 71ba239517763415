"""The built-in engine: any Hugging Face causal LM with full attention, on CPU or GPU, behind the face of engine.py.

Requests go to one compute thread (hf_thread.py), which runs the iterations of hf_core.py; what ends comes back to the
event loop. Weight swaps and aborts are commands that run between two iterations.
"""

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollout.config import RolloutConfig
from rollout.engine import Completion, Request, UpdateMode, check_request
from rollout.engines.checkpoint import chosen_length, end_ids_of
from rollout.engines.hf_core import HfCore
from rollout.engines.hf_support import check_agreement, check_supported
from rollout.engines.hf_thread import ComputeThread
from rollout.engines.in_process import InProcessPush

if TYPE_CHECKING:
    from torch import Tensor


class HfEngine(InProcessPush):
    """An `Engine`. It owns the model: its weights are overwritten by `load_weights`, its attention is set for decoding.

    Tokens depend on the seed of a sample, not on its neighbours. Logprobs may differ in the last bit with the number of
    rows in a matrix product; the same requests in one `submit` to an idle engine give the same bits.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any | None, config: RolloutConfig) -> None:
        """Take a loaded model (its dtype and device stay) and a transformers tokenizer, which only text needs.

        ValueError where the model's kind of cache or the asked length does not fit.
        """
        check_supported(model)
        limit = getattr(model.config, "max_position_embeddings", None)
        self._max_model_len = chosen_length(limit, asked=config.max_model_len)
        self._vocab_size: int = model.get_input_embeddings().num_embeddings
        self._tokenizer = tokenizer
        self._model = model
        self._core = HfCore(
            model,
            eos_ids=end_ids_of([model.config, getattr(model, "generation_config", None), tokenizer]),
            decode=self._texts,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self._max_model_len,
            max_prefill_tokens=config.max_prefill_tokens,
        )
        self._thread = ComputeThread(
            step=self._step,
            busy=lambda: self._core.busy,
            deliver=self._deliver_from_thread,
            fail=self._fail_from_thread,
            threads=config.threads,
        )
        self.start_receiving(self._core.device, path=model.name_or_path)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: set[int] = set()
        self._done: list[Completion] = []
        self._news = asyncio.Event()
        self._error: BaseException | None = None

    @classmethod
    def from_pretrained(cls, path: str, config: RolloutConfig) -> "HfEngine":
        """Load model and tokenizer from a folder or the hub. Blocks."""
        device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        return cls(model, AutoTokenizer.from_pretrained(path), config)

    @property
    def policy_version(self) -> int:
        """Of the weights that the next token is sampled with; 0 is the start model."""
        return self._core.policy_version

    @property
    def healthy(self) -> bool:
        """Whether the engine is started, not closed, and has not failed."""
        return self._loop is not None and self._error is None

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding."""
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response, in tokens."""
        return self._max_model_len

    async def start(self) -> None:
        """Start the compute thread; decode one token as a check. ValueError if the result is not the model's own."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        try:
            await self._ask(lambda: check_agreement(self._model))
        except ValueError:
            await self.close()
            raise

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; ValueError, and none is queued, if one is invalid or its id is unfinished."""
        self._raise_if_failed()
        self._check(requests)
        self._live.update(request.request_id for request in requests)
        self._send(lambda: self._core.submit(requests))

    async def finished(self) -> list[Completion]:
        """All completions since the last call, at least one."""
        while not self._done:
            self._raise_if_failed()
            self._news.clear()
            await self._news.wait()
        done, self._done = self._done, []
        return done

    async def abort(self, request_ids: Iterable[int]) -> None:
        """End samples between two tokens; they come out of `finished` as aborted. Unknown ids are ignored."""
        ids = list(request_ids)
        await self._ask(lambda: self._deliver_from_thread(self._with_text(self._core.abort(ids))))

    async def pause(self) -> None:
        """Return once no token is being sampled; none will be until `resume`."""
        await self._ask(self._thread.pause)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._ask(self._thread.resume)

    async def sleep(self) -> None:
        """Model to the host, KV slots and staging memory freed; on a CPU it only stops decoding."""
        self._receiver.release()
        await self._ask(self._core.sleep)

    async def wake(self) -> None:
        """Model to the device; what was under way is prefilled again and goes on."""
        await self._ask(self._core.wake)

    async def load_weights(self, version: int, tensors: "Iterable[tuple[str, Tensor]]", mode: UpdateMode) -> None:
        """Swap weights between two tokens; see `Engine.swap`. Works while paused."""
        given = list(tensors)
        await self._ask(lambda: self._core.load_weights(version, given, mode))

    def parameters(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of each parameter; tied ones once."""
        return self._core.parameters()

    async def close(self) -> None:
        """End after the token under way; a task in `finished` gets RuntimeError."""
        self._fail(RuntimeError("the engine is closed"))
        await asyncio.to_thread(self._thread.close)

    def _check(self, requests: Sequence[Request]) -> None:
        seen: set[int] = set()
        for request in requests:
            check_request(request, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
            if request.request_id in self._live or request.request_id in seen:
                raise ValueError(f"request {request.request_id}: a request of this id is unfinished")
            if request.sampling.stop and self._tokenizer is None:
                raise ValueError(f"request {request.request_id}: stop strings need a tokenizer")
            seen.add(request.request_id)

    def _send(self, command: Any) -> "Future[None]":
        if self._loop is None:
            raise RuntimeError("the engine is not started")
        return self._thread.ask(command)

    async def _ask(self, command: Any) -> None:
        self._raise_if_failed()
        await asyncio.wrap_future(self._send(command))

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"generation has stopped: {self._error}") from self._error

    def _step(self) -> list[Completion]:
        return self._with_text(self._core.step())

    def _with_text(self, done: list[Completion]) -> list[Completion]:
        if self._tokenizer is None or not done:
            return done
        texts = self._texts([one.token_ids.tolist() for one in done])
        return [dataclasses.replace(one, text=text) for one, text in zip(done, texts, strict=True)]

    def _texts(self, sequences: list[list[int]]) -> list[str]:
        assert self._tokenizer is not None
        texts: list[str] = self._tokenizer.batch_decode(sequences, skip_special_tokens=True)
        return texts

    def _deliver_from_thread(self, done: list[Completion]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, done)

    def _fail_from_thread(self, error: Exception) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail, error)

    def _deliver(self, done: list[Completion]) -> None:
        self._live.difference_update(one.request_id for one in done)
        self._done += done
        if done:
            self._news.set()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._news.set()
