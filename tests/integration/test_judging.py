"""Streams to judges and references: what a lost server had in hand goes to another, and nothing counts twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

import protos
from protos.arrays import to_array
from services.records.book import Book, Sample, State
from services.stages.judging import Judging
from services.stages.referring import Referring
from tests.integration.kit import member, serving, until
from tests.unit.services.life import Silence, made_trajectory


def new_book(*, group_size: int = 4, use_reference: bool = False) -> Book:
    return Book(group_size=group_size, use_reference=use_reference, max_attempts=4, journal=Silence())


def generated(book: Book) -> list[Sample]:
    group = book.accept(protos.Prompt(prompt_id="p", text="why?", ground_truth="so", extra={"level": "1"}))
    for sample in group.samples:
        book.lease(sample, lease_id=1, server="rollout-0", deadline=1.0)
        book.generate(sample, made_trajectory(sample.key))
    return group.samples


class Judge(protos.RewardServicer):
    """Grants `credit`, collects what it is asked, and answers when it is told to."""

    def __init__(self, *, credit: int = 100, answers: bool = True) -> None:
        self.credit = credit
        self.answers = answers
        self.asked: list[protos.ScoreItem] = []
        self.outbox: asyncio.Queue[protos.ScoreReply | None] = asyncio.Queue()

    async def Score(self, request_iterator: Any, context: Any) -> AsyncIterator[protos.ScoreReply]:
        self.outbox = asyncio.Queue()
        yield protos.ScoreReply(credit=protos.Credit(samples=self.credit))
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while (reply := await self.outbox.get()) is not None:
                yield reply
        finally:
            reader.cancel()

    async def _read(self, request_iterator: Any) -> None:
        async for request in request_iterator:
            self.asked.extend(request.items)
            if self.answers:
                self.outbox.put_nowait(scores(request.items))

    async def Describe(self, request: protos.DescribeRequest, context: Any) -> protos.DescribeReply:
        return protos.DescribeReply(route="r@1")

    def add(self, server: grpc.aio.Server) -> None:
        protos.add_RewardServicer_to_server(self, server)


def scores(
    items: Any,
    *,
    value: float = 1.0,
    failure: protos.ScoreFailure.ValueType = protos.SCORE_FAILURE_UNSPECIFIED,
    credit: int = 0,
) -> protos.ScoreReply:
    results = [
        protos.ScoreResult(
            key=item.key,
            ticket=item.ticket,
            value=value,
            route="r@1",
            failure=failure,
            message="why",
        )
        for item in items
    ]
    return protos.ScoreReply(results=results, credit=protos.Credit(samples=credit or len(results)))


class Listening:
    """A judging stage whose mailbox is emptied at once, and what it has told."""

    def __init__(self, book: Book, *, max_attempts: int = 2) -> None:
        self.book = book
        self.quarantined: list[str] = []
        self.ended: list[tuple[str, str]] = []
        self.judging = Judging(
            book,
            max_attempts=max_attempts,
            post=lambda message: message(),
            on_quarantine=self._quarantine,
            on_end=lambda name, reason: self.ended.append((name, reason)),
        )

    def _quarantine(self, sample: Sample, reason: str) -> None:
        self.quarantined.append(reason)
        self.book.quarantine(sample, reason)

    def credit(self, name: str) -> int:
        link = self.judging.station.links.get(name)
        return link.credit if link is not None else -1


@asynccontextmanager
async def judged_by(
    *judges: Judge, book: Book | None = None, max_attempts: int = 2
) -> AsyncIterator[tuple[Listening, list[str]]]:
    """The stage is linked to every judge under the names reward-0, reward-1, ..."""
    stage = Listening(book or new_book(), max_attempts=max_attempts)
    async with serving(*(judge.add for judge in judges[:1])) as first:
        addresses = [first]
        async with serving(*(judge.add for judge in judges[1:])) as second:
            addresses += [second] * (len(judges) - 1)
            for at, address in enumerate(addresses):
                await stage.judging.connect(member(f"reward-{at}", address))
                await until(lambda name=f"reward-{at}": stage.credit(name) > 0)  # type: ignore[misc]
            try:
                yield stage, addresses
            finally:
                await stage.judging.close()


async def test_no_more_is_asked_than_was_granted_and_every_sample_is_judged_once() -> None:
    judge = Judge(credit=3, answers=False)
    async with judged_by(judge) as (stage, _):
        samples = generated(stage.book) + generated(stage.book)
        stage.judging.want(samples)
        stage.judging.pump()
        await until(lambda: len(judge.asked) == 3)
        stage.judging.pump()
        assert stage.judging.in_hand("reward-0") == 3 and stage.credit("reward-0") == 0
        judge.answers = True
        judge.outbox.put_nowait(scores(judge.asked, credit=5))
        await until(lambda: stage.credit("reward-0") == 5)
        stage.judging.pump()
        await until(lambda: all(sample.state is State.REFERENCED for sample in samples))
        assert stage.judging.in_hand("reward-0") == 0
        assert len(judge.asked) == len({item.ticket for item in judge.asked}) == 8


async def test_what_a_judge_sees_of_a_sample() -> None:
    judge = Judge()
    async with judged_by(judge) as (stage, _):
        stage.judging.want(generated(stage.book)[:1])
        stage.judging.pump()
        await until(lambda: len(judge.asked) == 1)
    item = judge.asked[0]
    assert (item.prompt, item.response, item.ground_truth) == ("why?", "a\x00b", "so")
    assert dict(item.extra) == {"level": "1", "response_tokens": "2"}


async def test_what_a_dead_judge_had_in_hand_is_asked_of_another() -> None:
    deaf, judge = Judge(credit=100, answers=False), Judge(credit=1)
    stage = Listening(new_book())
    async with serving(judge.add) as living:
        async with serving(deaf.add) as dying:
            for name, address in (("reward-0", dying), ("reward-1", living)):
                await stage.judging.connect(member(name, address))
                await until(lambda name=name: stage.credit(name) > 0)  # type: ignore[misc]
            samples = generated(stage.book)
            stage.judging.want(samples)
            stage.judging.pump()
            await until(lambda: len(deaf.asked) == 4)
        await until(lambda: bool(stage.ended))
        assert stage.ended[0][0] == "reward-0"
        for _ in range(4):
            stage.judging.pump()
            await until(lambda: stage.credit("reward-1") == 1)
        await until(lambda: all(sample.state is State.REFERENCED for sample in samples))
        assert len(judge.asked) == 4
        await stage.judging.close()


async def test_an_answer_of_an_older_stream_counts_neither_as_a_score_nor_as_credit() -> None:
    judge = Judge(credit=10, answers=False)
    async with judged_by(judge) as (stage, addresses):
        (sample, *_) = generated(stage.book)
        stage.judging.want([sample])
        stage.judging.pump()
        await until(lambda: len(judge.asked) == 1)
        old = stage.judging.station.links["reward-0"]
        late = scores(judge.asked, credit=1000)
        await stage.judging.connect(member("reward-0", addresses[0]))
        await until(lambda: stage.credit("reward-0") == 10)
        stage.judging.station._replied(old, late)
        assert (sample.state, stage.credit("reward-0")) == (State.GENERATED, 10)
        assert list(stage.judging.waiting) == [sample], "it is asked again"
        stage.judging.station._ended(old, "late")
        assert "reward-0" in stage.judging.station.links and stage.ended == []


async def test_an_answer_that_nobody_waits_for_is_ignored() -> None:
    judge = Judge()
    async with judged_by(judge) as (stage, _):
        samples = generated(stage.book)
        stage.judging.want(samples)
        stage.judging.pump()
        await until(lambda: all(sample.state is State.REFERENCED for sample in samples))
        judge.outbox.put_nowait(scores(judge.asked, value=-1.0))
        await until(lambda: stage.judging.station.refused["unasked"] == 4)
        assert all(sample.trajectory is not None and sample.trajectory.reward == 1.0 for sample in samples)


async def test_a_failure_is_tried_again_and_then_the_sample_is_put_aside() -> None:
    judge = Judge(answers=False)
    async with judged_by(judge) as (stage, _):
        (sample, *_) = generated(stage.book)
        stage.judging.want([sample])
        for attempt in (1, 2):
            stage.judging.pump()
            await until(lambda attempt=attempt: len(judge.asked) == attempt)  # type: ignore[misc]
            judge.outbox.put_nowait(scores(judge.asked[-1:], failure=protos.SCORE_FAILURE_CRASH))
            await until(lambda attempt=attempt: stage.book.refused["reward_crash"] == attempt)  # type: ignore[misc]
        assert stage.quarantined == ["reward_crash: why"] and sample.state is State.QUARANTINED
        assert stage.book.counts().balanced


async def test_a_value_that_is_no_number_is_a_failure_whoever_sends_it() -> None:
    judge = Judge(answers=False)
    async with judged_by(judge, max_attempts=1) as (stage, _):
        stage.judging.want(generated(stage.book)[:2])
        stage.judging.pump()
        await until(lambda: len(judge.asked) == 2)
        judge.outbox.put_nowait(scores(judge.asked[:1], value=float("nan")))
        judge.outbox.put_nowait(scores(judge.asked[1:], value=float("inf")))
        await until(lambda: len(stage.quarantined) == 2)
    assert stage.book.refused["reward_invalid_value"] == 2


async def test_a_sample_that_ended_while_it_waited_is_not_asked_about() -> None:
    """Its whole group may be gone by then."""
    judge = Judge()
    async with judged_by(judge) as (stage, _):
        gone, kept = generated(stage.book), generated(stage.book)
        stage.judging.want([*gone, *kept])
        for sample in gone:
            stage.book.quarantine(sample, "reference: it was not finite")
        assert 0 not in stage.book.groups
        stage.judging.pump()
        await until(lambda: all(sample.state is State.REFERENCED for sample in kept))
        assert {item.key.group for item in judge.asked} == {1}
        assert stage.judging.in_hand("reward-0") == 0


class Oracle(protos.ReferenceServicer):
    """Answers with whatever `reply_to` makes of an item."""

    def __init__(self, reply_to: Callable[[protos.LogProbItem], protos.LogProbResult]) -> None:
        self.reply_to = reply_to
        self.asked = 0

    async def LogProbs(self, request_iterator: Any, context: Any) -> AsyncIterator[protos.LogProbReply]:
        yield protos.LogProbReply(credit=protos.Credit(samples=100))
        async for request in request_iterator:
            self.asked += len(request.items)
            results = [self.reply_to(item) for item in request.items]
            for item, result in zip(request.items, results, strict=True):
                result.ticket = item.ticket
            yield protos.LogProbReply(results=results, credit=protos.Credit(samples=len(results)))


@pytest.mark.parametrize(
    "wrong",
    [
        protos.LogProbResult(error="out of memory"),
        protos.LogProbResult(logprobs=to_array(np.zeros(3, np.float32))),
        protos.LogProbResult(logprobs=to_array(np.array([np.nan, 0], np.float32))),
        protos.LogProbResult(),
    ],
)
async def test_reference_logprobs_that_cannot_be_used_are_asked_again_then_the_sample_is_put_aside(
    wrong: protos.LogProbResult,
) -> None:
    book = new_book(group_size=1, use_reference=True)
    quarantined: list[str] = []
    oracle = Oracle(lambda item: wrong)
    referring = Referring(
        book,
        post=lambda message: message(),
        on_quarantine=lambda sample, reason: quarantined.append(reason) or book.quarantine(sample, reason),  # type: ignore[func-returns-value]
        on_end=lambda name, reason: None,
    )
    async with serving(lambda server: protos.add_ReferenceServicer_to_server(oracle, server)) as address:
        await referring.connect(member("reference-0", address))
        referring.want(generated(book))
        for _ in range(500):
            referring.pump()
            if quarantined:
                break
            await asyncio.sleep(0.01)
        await referring.close()
    assert oracle.asked == 3 and len(quarantined) == 1 and book.counts().balanced
