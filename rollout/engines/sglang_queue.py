"""The unfinished samples of an SGLang engine: each is one attempt in SGLang, and begins again as the next one."""

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rollout.engine import Completion, Request, check_request
from rollout.engines.sglang_host import Host
from rollout.engines.sglang_model import Outline
from rollout.engines.sglang_samples import Output, completion_of, rid_of, sampling_of


class SampleQueue:
    """Lives on the server's loop; the host's thread only brings it outputs.

    seeded: SGLang draws by the seeds. with_stops: stop strings are possible.
    """

    def __init__(self, host: Host, outline: Outline, *, seeded: bool, with_stops: bool) -> None:
        self._host = host
        self._outline = outline
        self._seeded = seeded
        self._with_stops = with_stops
        self._loop = asyncio.get_running_loop()
        self._live: dict[int, tuple[Request, int]] = {}
        self._done: list[Completion] = []
        self._news = asyncio.Event()
        self._salt = 0
        self._error: BaseException | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """See `Engine.submit`."""
        self.raise_if_failed()
        self._check(requests)
        self._live.update((request.request_id, (request, 0)) for request in requests)
        self._host.submit([self._sample(request, attempt=0) for request in requests], self._take)

    async def finished(self) -> list[Completion]:
        """See `Engine.finished`."""
        while not self._done:
            self.raise_if_failed()
            self._news.clear()
            await self._news.wait()
        done, self._done = self._done, []
        return done

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `Engine.abort`."""
        self.raise_if_failed()
        self._host.abort([rid_of(one, self._live[one][1]) for one in request_ids if one in self._live])

    def restart(self) -> None:
        """Abort all attempts and submit the next ones, with their seeds, in the old order."""
        self._host.abort([rid_of(request_id, attempt) for request_id, (_, attempt) in self._live.items()])
        self._live = {request_id: (request, attempt + 1) for request_id, (request, attempt) in self._live.items()}
        samples = [self._sample(request, attempt=attempt) for request, attempt in self._live.values()]
        self._host.submit(samples, self._take)

    def new_salt(self) -> str:
        """For the samples from now on: prompts that other weights have read are not found in SGLang's cache."""
        self._salt += 1
        return str(self._salt)

    def fail(self, error: BaseException) -> None:
        """Nothing more comes out; the first reason stays."""
        self._error = self._error or error
        self._news.set()

    def fail_from_thread(self, reason: str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail, RuntimeError(reason))

    @property
    def failed(self) -> bool:
        return self._error is not None

    def raise_if_failed(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"generation has stopped: {self._error}") from self._error

    def _check(self, requests: Sequence[Request]) -> None:
        seen: set[int] = set()
        for request in requests:
            check_request(request, vocab_size=self._outline.vocab_size, max_model_len=self._outline.max_model_len)
            if request.request_id in self._live or request.request_id in seen:
                raise ValueError(f"request {request.request_id}: a request of this id is unfinished")
            if request.sampling.stop and not self._with_stops:
                raise ValueError(f"request {request.request_id}: stop strings need a tokenizer and sglang.stop_strings")
            seen.add(request.request_id)

    def _sample(self, request: Request, *, attempt: int) -> dict[str, Any]:
        """Fields of SGLang's GenerateReqInput."""
        outline = self._outline
        return {
            "rid": rid_of(request.request_id, attempt),
            "input_ids": np.asarray(request.prompt_ids).tolist(),
            "sampling_params": sampling_of(
                request, end_ids=outline.end_ids, vocab_size=outline.vocab_size, seeded=self._seeded
            ),
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_sampling_mask": request.sampling.filters,
            "extra_key": str(self._salt),
        }

    # What comes back.

    def _take(self, rid: str, output: Output) -> None:
        """Called on the host's loop."""
        request_id, attempt, _ = rid.split(".")
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._finish, int(request_id), int(attempt), output)

    def _finish(self, request_id: int, attempt: int, output: Output) -> None:
        request, newest = self._live.get(request_id, (None, 0))
        if request is None or attempt != newest or self.failed:  # begun again since
            return
        try:
            done = completion_of(request, output, end_ids=self._outline.end_ids)
        except (ValueError, KeyError) as error:
            self.fail(error)
            return
        del self._live[request_id]
        if self._outline.tokenizer is None:
            self._deliver(done)
        else:
            self._loop.run_in_executor(None, self._with_text, done).add_done_callback(self._decoded)

    def _with_text(self, done: Completion) -> Completion:
        assert self._outline.tokenizer is not None
        text = self._outline.tokenizer.decode(done.token_ids.tolist(), skip_special_tokens=True)
        return dataclasses.replace(done, text=text)

    def _decoded(self, made: "asyncio.Future[Completion]") -> None:
        if made.cancelled():
            return
        error = made.exception()
        if error is not None:
            self.fail(error)
        else:
            self._deliver(made.result())

    def _deliver(self, done: Completion) -> None:
        self._done.append(done)
        self._news.set()
