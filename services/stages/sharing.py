"""One card in turns (`launch.time_sharing`): it is the trainer's from a recorded batch to its push, else the servers'.

    generation   leases go out; the trainer's state lies in host memory (trainer.offload)
        |        a batch is recorded: no more leases
    closing      what is leased comes in, or its lease ends; of an evaluation, too
        |        Sleep to every rollout server
    training     all sleep: the batch goes to the trainer, which brings its state to the card, steps, packs the new
        |        version, puts its state away, and pushes; the swap wakes a server
        |        the push is reported: Wake to every server that it has not reached
        '---> generation

Whose turn it is follows from the book alone, so a conductor that comes back knows it, too. What a server does follows
from what it has said in this membership: one that has just joined is asked for what the turn wants, and one that does
not answer is lost like any other, so nobody waits for the dead. With no server left the trainer goes on alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

import protos
from services.actor import cancel
from services.channel import call, close_all, connect
from services.errors import PeerError
from services.records.book import Book, State
from services.roster import Card, Member

ANSWER_SECONDS = 60.0
"""An engine copies its weights to host memory, or back."""


class Tell(Protocol):
    """One event of the run."""

    def __call__(self, kind: str, service: str, message: str, **facts: object) -> None: ...


class Sharing:
    """Lets rollout servers sleep and wake; without time sharing everybody is always free to work."""

    def __init__(
        self,
        book: Book,
        *,
        on: bool,
        members: Callable[[], Iterable[Member]],
        post: Callable[[Callable[[], None]], None],
        tell: Tell,
        on_problem: Callable[[Member, PeerError], None],
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`busy`: whether rollout servers have other samples in hand than the book knows of."""
        self.on = on
        self._busy = busy
        self.book = book
        self._members = members
        self._post = post
        self._tell = tell
        self._on_problem = on_problem
        self._asking: set[asyncio.Task[None]] = set()
        self._told_step = 0
        """Whose sleep was told last; 0 once they are awake again."""

    @property
    def trains(self) -> bool:
        """Whether the card is the trainer's: a batch is recorded, and its version is not pushed."""
        return self.on and self.book.recorded_step > self.book.pushed_version

    def may_lease(self, member: Member) -> bool:
        return not self.on or (not self.trains and member.card == "awake")

    def may_train(self, step: int) -> bool:
        """Steps go one by one: a push wakes the servers."""
        return not self.on or (step == self.book.pushed_version + 1 and self._all("asleep") and not self._leased())

    def pump(self) -> None:
        """Ask those who do not do yet what the turn wants."""
        if not self.on or (self.trains and self._leased()):
            return
        wanted: Card = "asleep" if self.trains else "awake"
        for member in self._members():
            if member.card not in (wanted, "asked"):
                member.card = "asked"
                self.ask(member, wanted)
        self._tell_turn(wanted)

    def pushed(self, member: Member) -> None:
        """A push has, perhaps, woken it."""
        member.card = "unknown"

    def trained(self, step: int) -> None:
        if self.on:
            self._tell("trained", "trainer", "the step is done", step=step)

    async def close(self) -> None:
        await cancel(*self._asking)

    def _leased(self) -> bool:
        return self._busy() or any(self.book.samples(State.LEASED))

    def _all(self, card: Card) -> bool:
        return all(member.card == card for member in self._members())

    def _tell_turn(self, wanted: Card) -> None:
        step = self.book.pushed_version + 1
        if not self._all(wanted):
            return
        if wanted == "asleep" and self._told_step != step:
            self._told_step = step
            self._tell("sleep", "conductor", "the rollout servers sleep: the card is the trainer's", step=step)
        if wanted == "awake" and self._told_step and any(self._members()):
            self._told_step = 0
            self._tell("wake", "conductor", "the rollout servers are awake: the card is theirs", version=step - 1)

    # Calls.

    def ask(self, member: Member, wanted: Card) -> None:
        """Tell a server to sleep or to wake; what it says comes as `answered`."""
        task = asyncio.create_task(self._call(member, wanted), name=f"{wanted}-{member.name}")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _call(self, member: Member, wanted: Card) -> None:
        channel = connect(member.address)
        stub = protos.RolloutStub(channel)
        problem: PeerError | None = None
        try:
            if wanted == "asleep":
                what = f"letting {member.name} sleep"
                await call(stub.Sleep, protos.SleepRequest(), deadline_seconds=ANSWER_SECONDS, what=what)
            else:
                what = f"waking {member.name}"
                await call(stub.Wake, protos.WakeRequest(), deadline_seconds=ANSWER_SECONDS, what=what)
        except PeerError as error:
            problem = error
        finally:
            await close_all([channel])
        self._post(lambda: self.answered(member, wanted, problem))

    def answered(self, member: Member, wanted: Card, problem: PeerError | None) -> None:
        """It does what was wanted, or has a problem."""
        if member.card == "asked":  # else a push has come between: it is asked again
            member.card = "unknown" if problem else wanted
        if problem is not None:
            self._on_problem(member, problem)
