"""Trajectory to reward: typed failures, another try, then quarantine. Never a silent zero."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import protos
from services.records.book import Group, Sample, State
from services.stages.station import Asking, Station

FAILURES: dict[int, str] = {
    protos.SCORE_FAILURE_TIMEOUT: "reward_timeout",
    protos.SCORE_FAILURE_CRASH: "reward_crash",
    protos.SCORE_FAILURE_INVALID_VALUE: "reward_invalid_value",
    protos.SCORE_FAILURE_ERROR: "reward_error",
}


class Judged(Protocol):
    """Where the samples are: services/records/book.py, or services/evaluation/sheet.py for those of an evaluation."""

    refused: Counter[str]

    @property
    def groups(self) -> Mapping[int, Group]:
        """By position."""

    def score(self, sample: Sample, *, value: float, breakdown: dict[str, float], route: str) -> None:
        """A generated sample has its reward."""


class Judging(Asking[protos.ScoreRequest, protos.ScoreReply]):
    """The reward services of a run, seen from the conductor."""

    def __init__(
        self,
        book: Judged,
        *,
        max_attempts: int,
        post: Callable[[Callable[[], None]], None],
        on_quarantine: Callable[[Sample, str], None],
        on_end: Callable[[str, str], None],
    ) -> None:
        self.book = book
        self._max_attempts = max_attempts
        self._on_quarantine = on_quarantine
        self.station = Station(
            open_stream=lambda channel: protos.RewardStub(channel).Score(),
            ask=self._request,
            post=post,
            on_reply=self._replied,
            on_end=on_end,
        )

    def _request(self, items: list[tuple[int, Sample]]) -> protos.ScoreRequest:
        return protos.ScoreRequest(items=[self._item(ticket, sample) for ticket, sample in items])

    def _item(self, ticket: int, sample: Sample) -> protos.ScoreItem:
        group, trajectory = self.book.groups[sample.group], sample.trajectory
        assert trajectory is not None
        prompt = group.prompt
        return protos.ScoreItem(
            key=trajectory.key,
            prompt=prompt_text(group),
            response=trajectory.response_text,
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            extra={**prompt.extra, "response_tokens": str(trajectory.response_ids.shape[0])},
            ticket=ticket,
        )

    def _replied(self, server: str, reply: protos.ScoreReply) -> None:
        self.station.grant(server, reply.credit.samples)
        for result in reply.results:
            sample = self.station.answered(result.ticket)
            if sample is not None and sample.state is State.GENERATED:
                self._judge(sample, result)

    def _judge(self, sample: Sample, result: protos.ScoreResult) -> None:
        failure = result.failure or (0 if finite(result.value) else protos.SCORE_FAILURE_INVALID_VALUE)
        if not failure:
            sample.answer = result.answer if result.HasField("answer") else None
            self.book.score(sample, value=result.value, breakdown=dict(result.breakdown), route=result.route)
            return
        reason = FAILURES.get(failure, "reward_error")
        self.book.refused[reason] += 1
        sample.score_attempts += 1
        if sample.score_attempts < self._max_attempts:
            self.station.want([sample])
        else:
            self._on_quarantine(sample, f"{reason}: {result.message}")


def finite(value: float) -> bool:
    return value - value == 0.0


def prompt_text(group: Group) -> str:
    """What a reward sees of a prompt: its text, or the last message of the user."""
    if group.prompt.text or not group.prompt.messages:
        return group.prompt.text
    asked = [message.content for message in group.prompt.messages if message.role == "user"]
    return asked[-1] if asked else group.prompt.messages[-1].content
