"""Which rollout server takes which lease: by the version that each has, so that staleness is bounded by construction.

A sample that a server of version w begins is meant for step w + max_staleness + 1 at the latest, for no more samples
are outstanding than the steps up to that one take. So servers of different versions may serve at once: one that is
behind is let in on a sample only where the bound holds for its own, older version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from services.records.book import Book
from services.roster import Member, Roster
from services.stages.generation import RolloutLink


class Run(Protocol):
    """What the run's config says about how much may be under way."""

    @property
    def num_steps(self) -> int: ...
    @property
    def prompts_per_step(self) -> int: ...
    @property
    def max_staleness(self) -> int: ...


class Routing:
    """Reads the roster and the book; changes nothing."""

    def __init__(
        self,
        roster: Roster,
        book: Book,
        run: Run,
        *,
        max_version_skew: int,
        may_lease: Callable[[Member], bool] = lambda member: True,
    ) -> None:
        """`may_lease`: what else there is that keeps a server from work, e.g. that it sleeps."""
        self.roster = roster
        self.book = book
        self.run = run
        self.max_version_skew = max_version_skew
        self._may_lease = may_lease

    @property
    def bound(self) -> int:
        """Samples that may be outstanding."""
        return (self.run.max_staleness + 1) * self.run.prompts_per_step * self.book.samples_per_group

    @property
    def trained_all(self) -> bool:
        """Whether every step is trained and pushed."""
        return self.book.trained_step >= self.run.num_steps <= self.book.pushed_version

    # Admission.

    def may_accept(self, version: int) -> bool:
        """Whether a server of `version` may begin the next group, and the run still needs one.

        A whole group must fit under the bound: a quarantined sample makes no room for the samples of the next step.
        """
        needed = (self.run.num_steps - self.book.recorded_step) * self.run.prompts_per_step
        fits = self.book.outstanding_at(version) + self.book.samples_per_group <= self.bound
        return fits and len(self.book.groups) < needed

    def may_redo(self, version: int) -> bool:
        """Whether a server of `version` may begin samples anew that were accepted before.

        The newest one always may: nothing better is to be had.
        """
        return version == self.newest() or self.book.outstanding_at(version) <= self.bound

    # Servers.

    def serves(self, name: str) -> bool:
        """A server takes leases once it has a version of this trainer's, as long as it does not lag too far behind."""
        return name in self._serving()

    def newest(self) -> int:
        """The newest version that a server has; 0 where there is none."""
        return max((member.policy_version for member in self._holders()), default=0)

    def floor(self, pushed: int) -> int:
        """What every server has at least, now that some have got the version `pushed`."""
        return min(pushed, min((member.policy_version for member in self._holders()), default=pushed))

    def in_order(self, links: Iterable[RolloutLink]) -> list[tuple[RolloutLink, int]]:
        """(link, version) of the servers that take a group now: the newest version first, then who has least in hand.

        While versions differ nobody gets more than its share of what may be outstanding: the room that a push makes
        would go to the first server that has the new version, and the others would idle when they come up.
        """
        version = self._serving()
        share = self.bound if len(set(version.values())) < 2 else -(-self.bound // len(version))
        size = self.book.samples_per_group
        able = [link for link in links if link.name in version and link.credit >= size]
        free = [link for link in able if not link.in_hand or link.in_hand + size <= share]
        free.sort(key=lambda link: (-version[link.name], link.in_hand, link.name))
        return [(link, version[link.name]) for link in free]

    def _serving(self) -> dict[str, int]:
        """Name -> version of the servers that do not lag too far behind."""
        oldest = self.newest() - self.max_version_skew
        able = [member for member in self._holders() if member.policy_version >= oldest and self._may_lease(member)]
        return {member.name: member.policy_version for member in able}

    def _holders(self) -> list[Member]:
        return [member for member in self.roster.of("rollout") if member.has_version]
