"""A stop on the way of a sample: items go out to any of several servers and come back by ticket.

Rewards and reference logprobs are both asked for in this way. An answer that nobody waits for is counted and ignored;
what a lost server had in hand is asked of another one.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from services.records.book import FINAL, Sample
from services.roster import Member
from services.stages.link import Link

Request = TypeVar("Request")
Reply = TypeVar("Reply")
ITEMS_A_MESSAGE = 64


@dataclass(slots=True)
class Open:
    """A question that waits for its answer."""

    sample: Sample
    server: str


class Station(Generic[Request, Reply]):
    """The links to all servers of one kind and the samples that wait for them."""

    def __init__(
        self,
        *,
        open_stream: Callable[[grpc.aio.Channel], object],
        ask: Callable[[list[tuple[int, Sample]]], Request],
        post: Callable[[Callable[[], None]], None],
        on_reply: Callable[[str, Reply], None],
        on_end: Callable[[str, str], None],
    ) -> None:
        self.links: dict[str, Link[Request, Reply]] = {}
        self.waiting: deque[Sample] = deque()
        self.open: dict[int, Open] = {}
        self.refused: Counter[str] = Counter()
        self._tickets = itertools.count(1)
        self._open_stream = open_stream
        self._ask = ask
        self._post = post
        self._on_reply = on_reply
        self._on_end = on_end

    async def connect(self, member: Member) -> None:
        """Open a stream to a server that has joined, in place of an older one to it."""
        await self.drop(member.name)
        self.links[member.name] = Link(
            member.name,
            member.address,
            open_stream=self._open_stream,
            on_reply=lambda link, reply: self._post(lambda: self._replied(link, reply)),
            on_end=lambda link, reason: self._post(lambda: self._ended(link, reason)),
        )

    async def drop(self, name: str) -> None:
        """Close the stream to a server and ask others what it had in hand."""
        link = self.links.pop(name, None)
        if link is not None:
            await link.close()
            self._ask_again(name)

    def in_hand(self, name: str) -> int:
        return self.links[name].in_hand if name in self.links else 0

    def want(self, samples: Iterable[Sample]) -> None:
        """Queue samples for the next free server."""
        self.waiting.extend(samples)

    def pump(self) -> None:
        """Send what waits, as far as credits go, to the server with the most credit."""
        while self.waiting and self.links:
            link = max(self.links.values(), key=lambda link: link.credit)
            items = self._take(min(link.credit, ITEMS_A_MESSAGE))
            if not items:
                return
            for ticket, sample in items:
                self.open[ticket] = Open(sample, link.name)
            link.credit -= len(items)
            link.in_hand += len(items)
            link.send(self._ask(items))

    def _take(self, count: int) -> list[tuple[int, Sample]]:
        """Up to `count` samples from the queue, with a ticket each; what has ended meanwhile needs no answer."""
        items: list[tuple[int, Sample]] = []
        while self.waiting and len(items) < count:
            sample = self.waiting.popleft()
            if sample.state not in FINAL:
                items.append((next(self._tickets), sample))
        return items

    def answered(self, ticket: int) -> Sample | None:
        """The sample that a result is for; None (and counted) where nobody waits for it."""
        entry = self.open.pop(ticket, None)
        if entry is None:
            self.refused["unasked"] += 1
            return None
        link = self.links.get(entry.server)
        if link is not None:
            link.in_hand -= 1
        return entry.sample

    def grant(self, server: str, samples: int) -> None:
        """Note credit that a server grants."""
        link = self.links.get(server)
        if link is not None:
            link.credit += samples

    async def close(self) -> None:
        for link in list(self.links.values()):
            await link.close()
        self.links.clear()

    def _replied(self, link: Link[Request, Reply], reply: Reply) -> None:
        if self.links.get(link.name) is link:  # what an older stream still says was asked again, and its credit is void
            self._on_reply(link.name, reply)

    def _ended(self, link: Link[Request, Reply], reason: str) -> None:
        if self.links.get(link.name) is link:
            del self.links[link.name]
            self._ask_again(link.name)
            self._on_end(link.name, reason)

    def _ask_again(self, server: str) -> None:
        tickets = [ticket for ticket, entry in self.open.items() if entry.server == server]
        for ticket in tickets:
            self.waiting.append(self.open.pop(ticket).sample)


class Asking(Generic[Request, Reply]):
    """A stage of the conductor that asks servers of one kind. Subclasses make the station and read its replies."""

    station: Station[Request, Reply]

    async def connect(self, member: Member) -> None:
        await self.station.connect(member)

    async def drop(self, name: str, reason: str) -> None:
        await self.station.drop(name)

    def in_hand(self, name: str) -> int:
        return self.station.in_hand(name)

    async def close(self) -> None:
        await self.station.close()

    def want(self, samples: list[Sample]) -> None:
        """Ask about generated samples."""
        self.station.want(samples)

    def pump(self) -> None:
        self.station.pump()

    @property
    def waiting(self) -> deque[Sample]:
        return self.station.waiting
