"""What the rollout servers do beside training, as the stage sees it that holds the streams to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import protos

if TYPE_CHECKING:
    from services.stages.generation import RolloutLink


class Aside(Protocol):
    """Other work on the same streams; services/evaluation/evaluating.py in a run. Its samples carry a number."""

    def requests(
        self, links: Iterable[RolloutLink], lease_ids: Iterator[int]
    ) -> Iterable[tuple[RolloutLink, protos.GenerateRequest]]:
        """What is to be sent now, after the leases of training; takes the credit that it uses."""

    def take(self, trajectory: protos.Trajectory, reason: str) -> None:
        """A sample has come back; `reason`: why it cannot be used, empty where it can."""

    def nacked(self, nack: protos.Nack) -> None:
        """A sample has come back undone."""

    def void(self, server: str, reason: str) -> None:
        """The stream to a server has ended, and its leases with it."""

    def expire(self) -> None:
        """Time has passed."""


class Nothing:
    """No other work."""

    def requests(
        self, links: Iterable[RolloutLink], lease_ids: Iterator[int]
    ) -> Iterable[tuple[RolloutLink, protos.GenerateRequest]]:
        return ()

    def take(self, trajectory: protos.Trajectory, reason: str) -> None:
        """Nobody has asked for it."""

    def nacked(self, nack: protos.Nack) -> None:
        """Nobody has asked for it."""

    def void(self, server: str, reason: str) -> None:
        """It had nothing."""

    def expire(self) -> None:
        """Nothing is under way."""
