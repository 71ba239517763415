"""The reward service: score requests in, results out, in the order in which they are done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

import protos
from reward.function import Failure, Outcome, RewardError, ScoreItem
from reward.scorer import Scorer
from services.errors import ConfigError, OffbeatError
from services.faults import fault
from services.streams import Outbox
from services.worker import Worker

FAILURE_CODES = {
    "timeout": protos.SCORE_FAILURE_TIMEOUT,
    "crash": protos.SCORE_FAILURE_CRASH,
    "invalid_value": protos.SCORE_FAILURE_INVALID_VALUE,
    "error": protos.SCORE_FAILURE_ERROR,
}


class RewardService(Worker, protos.RewardServicer):
    """Serves the reward functions of the config."""

    role = "reward"

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        protos.add_RewardServicer_to_server(self, server)
        return ("offbeat.v1.Reward",)

    async def prepare(self) -> None:
        self.scorer = Scorer(self.config.reward)
        try:
            await self.scorer.start()
        except RewardError as error:
            raise ConfigError([f"reward: {error}"]) from error
        self._broken: asyncio.Future[RewardError] = asyncio.get_running_loop().create_future()
        self.route = "+".join(self.scorer.routes)
        self.identity.capabilities.append(f"route:{self.route}")

    async def serve(self) -> None:
        """Until the workers cannot be had any more: then a fresh process may do better."""
        raise OffbeatError(f"no reward: {await self._broken}")

    async def finish(self) -> None:
        await self.scorer.close()

    async def Score(
        self, request_iterator: AsyncIterator[protos.ScoreRequest], context: Any
    ) -> AsyncIterator[protos.ScoreReply]:
        outbox: Outbox[protos.ScoreReply] = Outbox()
        outbox.put(protos.ScoreReply(credit=protos.Credit(samples=self.config.reward.max_pending)))
        async for reply in outbox.replies(self._read(request_iterator, outbox)):
            yield reply

    async def _read(
        self, request_iterator: AsyncIterator[protos.ScoreRequest], outbox: Outbox[protos.ScoreReply]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            async for request in request_iterator:
                group.create_task(self._score(list(request.items), outbox))

    async def _score(self, items: list[protos.ScoreItem], outbox: Outbox[protos.ScoreReply]) -> None:
        fault(self.name, "reward.asked")
        try:
            outcomes = await self.scorer.score([from_wire(item) for item in items])
        except RewardError as error:
            if not (self._broken.done() or self.draining.is_set()):
                self._broken.set_result(error)
            return
        results = [self._result(item, outcome) for item, outcome in zip(items, outcomes, strict=True)]
        outbox.put(protos.ScoreReply(results=results, credit=protos.Credit(samples=len(items))))

    def _result(self, item: protos.ScoreItem, outcome: Outcome) -> protos.ScoreResult:
        result = protos.ScoreResult(key=item.key, ticket=item.ticket, route=self.route)
        if isinstance(outcome, Failure):
            result.failure, result.message = FAILURE_CODES[outcome.kind], outcome.message
        else:
            result.value = outcome.value
            result.breakdown.update(outcome.breakdown)
            if outcome.answer is not None:
                result.answer = outcome.answer
        return result

    async def Describe(self, request: protos.DescribeRequest, context: Any) -> protos.DescribeReply:
        tests = [test for function in self.scorer.describe() for test in function.self_test]
        return protos.DescribeReply(
            route=self.route,
            fields=["prompt", "response", "ground_truth", "data_source", "extra"],
            self_tests=[protos.SelfTest(item=to_wire(item), value=value) for item, value in tests],
        )


def from_wire(item: protos.ScoreItem) -> ScoreItem:
    return ScoreItem(
        prompt=item.prompt,
        response=item.response,
        ground_truth=item.ground_truth,
        data_source=item.data_source,
        extra=dict(item.extra),
    )


def to_wire(item: ScoreItem) -> protos.ScoreItem:
    return protos.ScoreItem(
        prompt=item.prompt,
        response=item.response,
        ground_truth=item.ground_truth,
        data_source=item.data_source,
        extra=item.extra,
    )
