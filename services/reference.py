"""The reference service: token logprobs of a frozen policy, computed on the actor's compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

import protos
from protos.arrays import from_array, to_array
from services.faults import fault
from services.streams import Outbox
from services.vocabulary import check_same_tokens
from services.worker import Worker

CREDIT_SAMPLES = 4096


class ReferenceService(Worker, protos.ReferenceServicer):
    """Serves the logprobs of the reference model."""

    role = "reference"

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        protos.add_ReferenceServicer_to_server(self, server)
        return ("offbeat.v1.Reference",)

    async def prepare(self) -> None:
        self._items: list[tuple[protos.LogProbItem, Outbox[protos.LogProbReply]]] = []
        self._news = asyncio.Event()
        await self.load(self._load)

    def _load(self) -> None:
        from trainer.model.load import load_model, prepare_process
        from trainer.reference import ReferencePolicy

        config = self.config
        if config.reference.model is not None:
            check_same_tokens(config.reference.model, config.trainer.model)
        prepare_process(threads=config.reference.threads, seed=config.trainer.seed)
        model: Any = load_model(
            config.reference.model or config.trainer.model,
            dtype=config.trainer.dtype,
            attn_implementation=config.trainer.attn_implementation,
            device=config.trainer.device,
        )
        self._vocab_size: int = model.get_input_embeddings().num_embeddings
        self._policy = ReferencePolicy(
            model,
            config.reference.max_tokens_per_microbatch,
            temperature=config.trainer.algorithm.temperature,
            max_logits_mib=config.trainer.max_logits_mib,
        )

    async def LogProbs(
        self, request_iterator: AsyncIterator[protos.LogProbRequest], context: Any
    ) -> AsyncIterator[protos.LogProbReply]:
        outbox: Outbox[protos.LogProbReply] = Outbox()
        outbox.put(protos.LogProbReply(credit=protos.Credit(samples=CREDIT_SAMPLES)))
        async for reply in outbox.replies(self._read(request_iterator, outbox)):
            yield reply

    async def _read(
        self, request_iterator: AsyncIterator[protos.LogProbRequest], outbox: Outbox[protos.LogProbReply]
    ) -> None:
        async for request in request_iterator:
            fault(self.name, "reference.asked")
            self._items.extend((item, outbox) for item in request.items)
            self._news.set()

    async def serve(self) -> None:
        """Compute whatever has come in, all at once: the busier the service, the larger its batches."""
        while True:
            await self._news.wait()
            self._news.clear()
            work, self._items = self._items, []
            results = await self.compute(self._logprobs, [item for item, _ in work])
            replies: dict[int, tuple[Outbox[protos.LogProbReply], protos.LogProbReply]] = {}
            for (_, outbox), result in zip(work, results, strict=True):
                reply = replies.setdefault(id(outbox), (outbox, protos.LogProbReply()))[1]
                reply.results.append(result)
                reply.credit.samples += 1
            for outbox, reply in replies.values():
                outbox.put(reply)

    def _logprobs(self, items: list[protos.LogProbItem]) -> list[protos.LogProbResult]:
        results = [
            protos.LogProbResult(key=item.key, ticket=item.ticket, error=problem(item, vocab_size=self._vocab_size))
            for item in items
        ]
        good = [(item, result) for item, result in zip(items, results, strict=True) if not result.error]
        prompts = [from_array(item.prompt_ids) for item, _ in good]
        responses = [from_array(item.response_ids) for item, _ in good]
        for (_, result), logprobs in zip(good, self._policy.logprobs(prompts, responses), strict=True):
            result.logprobs.CopyFrom(to_array(logprobs))
        return results


def problem(item: protos.LogProbItem, *, vocab_size: int) -> str:
    """Why an item cannot be scored; empty where it can."""
    for name, array in (("prompt_ids", item.prompt_ids), ("response_ids", item.response_ids)):
        if array.dtype != protos.DTYPE_INT32 or len(array.shape) != 1 or array.shape[0] * 4 != len(array.data):
            return f"{name} is not int32 [n]"
        if not array.data:
            return f"{name} is empty"
        token_ids = from_array(array)
        if token_ids.min() < 0 or token_ids.max() >= vocab_size:
            return f"{name} holds a token that the model does not know"
    return ""
