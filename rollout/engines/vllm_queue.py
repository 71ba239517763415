"""From submit to completion: samples enter vLLM in order, each is awaited once, and a swap closes their version spans.

submit -> inbox -> add (one at a time, behind the gate) -> vLLM -> collect -> done
                     ^------------- begin again -----------------'
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from vllm import SamplingParams as VllmSamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from rollout.engine import Completion, Request, UpdateMode
from rollout.engines.vllm_core import VllmCore
from rollout.engines.vllm_samples import aborted, completion_of, vllm_seed

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestOutputCollector

ADDS_IN_A_ROW = 4
"""Each takes about a millisecond of the loop, and a push that begins meanwhile waits for its turns."""


@dataclass(slots=True, eq=False)
class Sample:
    """An unfinished sample. starts: (policy_version, index of its first token). collector: None while it waits here."""

    request: Request
    starts: list[tuple[int, int]] = field(default_factory=list)
    collector: "RequestOutputCollector | None" = None
    task: "asyncio.Task[None] | None" = None


class SampleQueue:
    """All unfinished samples. done and fail are called on the event loop."""

    def __init__(
        self,
        core: VllmCore,
        *,
        end_ids: Sequence[int],
        per_sample_seeds: bool,
        done: Callable[[Completion], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self.policy_version = 0
        self._core, self._done, self._fail = core, done, fail
        self._end_ids = list(end_ids)
        self._per_sample_seeds = per_sample_seeds
        self._live: dict[int, Sample] = {}
        self._inbox: deque[Sample] = deque()
        self._gate = asyncio.Lock()  # held while samples enter, are aborted, or change version
        self._wake = asyncio.Event()
        self._adding = asyncio.create_task(self._add_all(), name="offbeat-vllm-add")

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue in this order."""
        for request in requests:
            sample = Sample(request)
            self._live[request.request_id] = sample
            self._inbox.append(sample)
        self._wake.set()

    async def abort(self, request_ids: Iterable[int]) -> None:
        """End samples, wherever they are; unknown ones are ignored."""
        async with self._gate:
            chosen = [sample for request_id in request_ids if (sample := self._live.get(request_id))]
            waiting = {id(sample) for sample in chosen if sample.collector is None}
            self._inbox = deque(sample for sample in self._inbox if id(sample) not in waiting)
            for sample in chosen:
                if sample.collector is None:
                    self._finish(sample, aborted(sample.request.request_id))
            await self._core.abort([sample.collector.request_id for sample in chosen if sample.collector])

    async def turn(self, version: int, mode: UpdateMode) -> None:
        """While the engine stands still: the next token of every sample is of `version`.

        Samples without a token begin anew in mode keep: their prompt may have been prefilled by the old weights.
        """
        async with self._gate:
            self.policy_version = version
            again = []
            for sample in self._live.values():
                if sample.collector is None or (tokens := self._core.num_tokens(sample.collector.request_id)) is None:
                    continue  # not begun, or finished under the old weights
                if mode == "restart" or (mode == "keep" and tokens == 0):
                    again.append(sample)
                else:
                    sample.starts.append((version, tokens))
            await self._begin_again(again)

    async def close(self) -> None:
        """Forget all samples."""
        tasks = [self._adding, *(sample.task for sample in self._live.values() if sample.task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._live.clear()

    async def _begin_again(self, samples: Sequence[Sample]) -> None:
        keys = [sample.collector.request_id for sample in samples if sample.collector]
        for sample in samples:
            if sample.task is not None:
                sample.task.cancel()
            sample.collector = sample.task = None
        await self._core.abort(keys)
        self._inbox.extendleft(reversed(samples))
        self._wake.set()

    async def _add_all(self) -> None:
        try:
            while True:
                self._wake.clear()
                for count in range(len(self._inbox)):
                    await self._add_next()
                    if count % ADDS_IN_A_ROW == ADDS_IN_A_ROW - 1:
                        await asyncio.sleep(0)
                if not self._inbox:
                    await self._wake.wait()
        except Exception as error:
            self._fail(error)

    async def _add_next(self) -> None:
        async with self._gate:
            if not self._inbox:
                return
            sample = self._inbox.popleft()
            request = sample.request
            prompt = tokens_input(np.asarray(request.prompt_ids).tolist(), cache_salt=f"v{self.policy_version}")
            sample.starts = [(self.policy_version, 0)]
            sample.collector = await self._core.llm.add_request(str(request.request_id), prompt, self._params(request))
            sample.task = asyncio.create_task(self._collect(sample, sample.collector))

    def _params(self, request: Request) -> VllmSamplingParams:
        ours = request.sampling
        return VllmSamplingParams(
            temperature=ours.temperature,
            top_p=ours.top_p,
            top_k=max(ours.top_k, 0),
            max_tokens=ours.max_tokens,
            stop=list(ours.stop),
            stop_token_ids=[] if ours.ignore_eos else self._end_ids,
            ignore_eos=ours.ignore_eos,
            seed=vllm_seed(request.seed) if self._per_sample_seeds else None,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(ours.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # made for this request alone; a deep copy takes half a millisecond
        )

    async def _collect(self, sample: Sample, collector: "RequestOutputCollector") -> None:
        try:
            output = await collector.get()
            completion = completion_of(sample.request.request_id, output.outputs[0], sample.starts)
        except Exception as error:
            self._fail(error)
        else:
            self._finish(sample, completion)

    def _finish(self, sample: Sample, completion: Completion) -> None:
        del self._live[sample.request.request_id]
        self._done(completion)
