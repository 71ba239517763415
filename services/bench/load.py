"""Work for one rollout server: the conductor's own leases, book and ledger, driven by a bench."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from services.errors import OffbeatError
from services.records.book import Book, Sample
from services.records.ledger import Ledger
from services.stages.generation import Generation, RolloutLink

if TYPE_CHECKING:
    from services.config import Config
    from services.roster import Member

LEASE_SECONDS = 600.0
STREAM_SECONDS = 10.0


class Demand:
    """Every server may begin the next group as long as more is wanted."""

    def __init__(self, group_size: int, *, wants: Callable[[], bool]) -> None:
        self._group_size = group_size
        self._wants = wants

    def in_order(self, links: Iterable[RolloutLink]) -> list[tuple[RolloutLink, int]]:
        """Who has credit for a group."""
        return [(link, 0) for link in links if link.credit >= self._group_size]

    def may_accept(self, version: int) -> bool:
        return self._wants()

    def may_redo(self, version: int) -> bool:
        return True


class Load:
    """Grants leases while `wants` says so and takes what comes back; a finished group leaves the book."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.num_samples = self.num_tokens = 0
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.book = Book(group_size=config.run.group_size, use_reference=False, max_attempts=1, journal=self.ledger)
        self._wants: Callable[[], bool] = lambda: False
        self._news = asyncio.Event()
        self._problem = ""
        self._generation = Generation(
            self.book,
            sampling=config.sampling(),
            run_seed=config.run.seed,
            life=1,
            lease_seconds=LEASE_SECONDS,
            next_prompt=config.prompts(),
            routing=Demand(config.run.group_size, wants=lambda: self._wants()),
            clock=asyncio.get_running_loop().time,
            post=self._post,
            on_generated=self._generated,
            on_end=lambda name, reason: self._fail(f"the stream to {name} ended: {reason}"),
            on_quarantine=lambda sample, reason: self._fail(f"sample {sample.key} came back undone: {reason}"),
        )

    async def connect(self, member: Member) -> None:
        """Open the stream and wait for credit."""
        await self._generation.connect(member)
        await self.until(lambda: self._generation.links[member.name].credit > 0, seconds=STREAM_SECONDS)

    async def close(self) -> None:
        await self._generation.close()
        self.ledger.close()

    def wants(self, condition: Callable[[], bool]) -> None:
        """From now on lease another group whenever this holds and there is credit."""
        self._wants = condition
        self._generation.pump()

    def expect_version(self, version: int) -> None:
        """Samples may now come with tokens of this policy_version."""
        self.book.recorded_step = version

    def in_hand(self, name: str) -> int:
        """Samples that the server works on."""
        return self._generation.in_hand(name)

    async def round(self, samples: int, *, seconds: float) -> tuple[float, int]:
        """Lease so many samples as credit allows; (seconds from the first lease to the last trajectory, tokens)."""
        before, wanted = self.num_tokens, self.num_samples + samples
        began = time.perf_counter()
        self.wants(lambda: self.book.accepted < wanted)
        await self.until(lambda: self.num_samples >= wanted, seconds=seconds)
        return time.perf_counter() - began, self.num_tokens - before

    async def until(self, condition: Callable[[], bool], *, seconds: float) -> None:
        """Wait for something that comes with a reply. OffbeatError where the server fails or time is up."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    if self._problem:
                        raise OffbeatError(self._problem)
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise OffbeatError(f"the rollout service did not get there in {seconds:g} s") from None

    def _post(self, message: Callable[[], None]) -> None:
        message()
        self._generation.pump()
        self._news.set()

    def _generated(self, samples: list[Sample]) -> None:
        for sample in samples:
            assert sample.trajectory is not None
            self.num_samples += 1
            self.num_tokens += sample.trajectory.response_ids.shape[0]
            self.book.score(sample, value=0.0, breakdown={}, route="bench@1")
            if sample.group in self.book.complete:
                self.book.drop_group(self.book.groups[sample.group], "bench")

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._news.set()
