"""Trajectory to reference logprobs: asked of any reference service while the reward is being judged.

A reference that is down is waited for: a sample without its logprobs is never trained on as if its KL were 0.
"""

from __future__ import annotations

from collections.abc import Callable

import protos
from services.records.book import Book, Sample, State
from services.stages.intake import refuse_reference
from services.stages.station import Asking, Station

MAX_ATTEMPTS = 3


class Referring(Asking[protos.LogProbRequest, protos.LogProbReply]):
    """The reference services of a run, seen from the conductor."""

    def __init__(
        self,
        book: Book,
        *,
        post: Callable[[Callable[[], None]], None],
        on_quarantine: Callable[[Sample, str], None],
        on_end: Callable[[str, str], None],
    ) -> None:
        self.book = book
        self._attempts: dict[tuple[int, int], int] = {}
        self._on_quarantine = on_quarantine
        self.station = Station(
            open_stream=lambda channel: protos.ReferenceStub(channel).LogProbs(),
            ask=self._request,
            post=post,
            on_reply=self._replied,
            on_end=on_end,
        )

    def _request(self, items: list[tuple[int, Sample]]) -> protos.LogProbRequest:
        return protos.LogProbRequest(items=[item(ticket, sample) for ticket, sample in items])

    def _replied(self, server: str, reply: protos.LogProbReply) -> None:
        self.station.grant(server, reply.credit.samples)
        for result in reply.results:
            sample = self.station.answered(result.ticket)
            if sample is not None and sample.state in (State.GENERATED, State.SCORED):
                self._refer(sample, result)

    def _refer(self, sample: Sample, result: protos.LogProbResult) -> None:
        assert sample.trajectory is not None
        problem = result.error or refuse_reference(result.logprobs, sample.trajectory)
        if not problem:
            self._attempts.pop(sample.key, None)
            self.book.refer(sample, result.logprobs)
            return
        self.book.refused["reference_error"] += 1
        attempts = self._attempts[sample.key] = self._attempts.get(sample.key, 0) + 1
        if attempts < MAX_ATTEMPTS:
            self.station.want([sample])
        else:
            self._on_quarantine(sample, f"reference: {problem}")


def item(ticket: int, sample: Sample) -> protos.LogProbItem:
    trajectory = sample.trajectory
    assert trajectory is not None
    return protos.LogProbItem(
        key=trajectory.key, prompt_ids=trajectory.prompt_ids, response_ids=trajectory.response_ids, ticket=ticket
    )
