"""The samples of the evaluation under way. They look like those of services/records/book.py and never enter it.

pending -> leased -> generated -> scored
             | lost -> pending (attempt + 1)
             '-> failed: no verdict, counted by reason
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import protos
from services.evaluation.verdicts import Verdict, figures, vote_of
from services.records.book import Group, Sample, State


class Sheet:
    """Emptied and filled anew for each evaluation."""

    def __init__(self) -> None:
        self.number = 0
        """Of the evaluation, from 1; samples carry it."""
        self.version = 0
        """Policy version that it was begun for."""
        self.groups: dict[int, Group] = {}
        self.pending: deque[Sample] = deque()
        self.failures: Counter[str] = Counter()
        """Samples without a verdict, by reason."""
        self.refused: Counter[str] = Counter()
        """Deliveries and scores that were turned away, by reason; over all evaluations."""
        self.unsettled = 0
        """Samples that have neither a verdict nor failed."""

    @property
    def open(self) -> bool:
        return bool(self.groups)

    def fill(self, prompts: Sequence[protos.Prompt], *, number: int, version: int, samples_per_prompt: int) -> None:
        """Begin: every sample is pending."""
        assert not self.open
        self.number, self.version = number, version
        for position, prompt in enumerate(prompts):
            samples = [Sample(position, index) for index in range(samples_per_prompt)]
            self.groups[position] = Group(position, prompt, samples, samples_per_prompt)
            self.pending.extend(samples)
        self.unsettled = len(self.pending)

    def clear(self) -> list[Sample]:
        """End: what still comes of it is late. Returns the samples that are leased."""
        leased = [sample for group in self.groups.values() for sample in group.samples if sample.state is State.LEASED]
        for group in self.groups.values():
            for sample in group.samples:
                sample.state = State.DROPPED
        self.groups.clear()
        self.pending.clear()
        self.failures.clear()
        self.unsettled = 0
        return leased

    # The life of a sample.

    def take(self, count: int) -> list[Sample]:
        """Up to `count` pending samples of one prompt."""
        taken: list[Sample] = []
        while self.pending and len(taken) < count and (not taken or self.pending[0].group == taken[0].group):
            taken.append(self.pending.popleft())
        return taken

    def lease(self, sample: Sample, *, lease_id: int, server: str, deadline: float) -> None:
        assert sample.state is State.PENDING
        sample.state, sample.lease_id, sample.server, sample.deadline = State.LEASED, lease_id, server, deadline
        sample.attempts += 1

    def leased(self, key: protos.SampleKey, lease_id: int) -> Sample | None:
        """The sample that waits for this delivery; None, and counted, where none does."""
        group = self.groups.get(key.group) if key.evaluation == self.number else None
        sample = group.samples[key.index] if group is not None and key.index < len(group.samples) else None
        if sample is not None and sample.state is State.LEASED and sample.lease_id == lease_id:
            return sample
        self.refused["late"] += 1
        return None

    def redo(self, sample: Sample) -> None:
        """A leased sample is pending again, before all others."""
        assert sample.state is State.LEASED
        sample.state, sample.lease_id, sample.server = State.PENDING, 0, ""
        self.pending.appendleft(sample)

    def generate(self, sample: Sample, trajectory: protos.Trajectory) -> None:
        assert sample.state is State.LEASED
        sample.state, sample.trajectory = State.GENERATED, trajectory

    def score(self, sample: Sample, *, value: float, breakdown: dict[str, float], route: str) -> None:
        assert sample.state is State.GENERATED and sample.trajectory is not None
        sample.trajectory.reward, sample.state = value, State.SCORED
        self.unsettled -= 1

    def fail(self, sample: Sample, reason: str) -> None:
        """No verdict on this sample."""
        sample.state = State.QUARANTINED
        self.failures[reason.partition(":")[0]] += 1
        self.unsettled -= 1

    # The result.

    def result(self, *, ks: Sequence[int], threshold: float) -> dict[str, Any]:
        """Figures, counts, and the versions whose weights made the tokens; see docs/metrics.md."""
        groups = list(self.groups.values())
        samples = [sample for group in groups for sample in group.samples]
        made = [sample.trajectory for sample in samples if sample.trajectory is not None]
        versions = [span.policy_version for trajectory in made for span in trajectory.spans]
        lengths = [trajectory.response_ids.shape[0] for trajectory in made]
        cut = sum(trajectory.stop_reason == protos.STOP_REASON_LENGTH for trajectory in made)
        verdicts = [[verdict for sample in group.samples for verdict in verdict_of(sample)] for group in groups]
        return {
            "version": self.version,
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
            **figures(verdicts, ks=ks, threshold=threshold),
            "num_prompts": len(groups),
            "num_samples": len(samples),
            "failures": dict(self.failures),
            "response_length_mean": sum(lengths) / max(len(lengths), 1),
            "truncation_rate": cut / max(len(made), 1),
        }


def verdict_of(sample: Sample) -> list[Verdict]:
    """One verdict, or none."""
    if sample.state is not State.SCORED or sample.trajectory is None:
        return []
    return [Verdict(sample.trajectory.reward, vote_of(sample.answer, sample.trajectory.response_text))]
