"""The conductor keeps the services in time.

        prompt stream
             |  accept, while outstanding < (max_staleness + 1) * batch
             v
    +-----------------+   leases    +---------+
    |      book       | ----------> | rollout |  any number; a group stays on one server
    |  (every sample, | <---------- +---------+
    |   in memory,    |   trajectories
    |   journalled    |   scores    +---------+
    |   in SQLite)    | <---------> | reward  |  both are asked at once,
    |                 |  logprobs   +-----------+ by ticket
    |                 | <---------> | reference |
    |                 |             +-----------+
    |                 |   batches   +---------+
    |                 | ----------> | trainer | ---- push of version v+1 ----> rollout servers
    +-----------------+ <---------- +---------+
                         reports: step trained, version pushed, checkpoint verified

Evaluations go the same way beside training, and never into the book: services/evaluation/evaluating.py.
Everything that happens is a message in one mailbox; after each handful of messages the loop pumps every stage once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

import protos
from services.actor import Actor, Bind, cancel
from services.desk import Desk
from services.ending import Ending, farewell
from services.errors import PeerError
from services.evaluation.evaluating import Evaluating
from services.records.book import Batch, Book, Sample, State
from services.records.journalist import Journalist
from services.records.ledger import Ledger
from services.records.recovery import recover
from services.records.status import status_of
from services.roster import Member, Roster, Stage
from services.stages.generation import Generation
from services.stages.health import Health
from services.stages.judging import Judging
from services.stages.referring import Referring
from services.stages.routing import Routing
from services.stages.sharing import Sharing
from services.stages.training import Training

if TYPE_CHECKING:
    from services.config import Config

Message = Callable[[], None]
TICK_SECONDS = 0.2
MAILBOX_SIZE = 100_000
GATHER_SECONDS = 0.002
"""After a first message the loop waits this long for more: fewer, fuller messages leave it."""


class Conductor(Actor):
    """The loop of a run."""

    role = "conductor"

    def __init__(self, bind: Bind, config: Config, *, folder: Path) -> None:
        super().__init__(bind)
        self.config = config
        self.folder = folder
        self.paused = False
        self.ending = Ending()
        self.finished = self.ending.finished
        self.mailbox: asyncio.Queue[Message] = asyncio.Queue(MAILBOX_SIZE)
        self.roster = Roster(heartbeat_seconds=config.conductor.heartbeat_seconds)
        self.health = Health(
            self.roster, limit=config.conductor.max_logprob_mismatch, patience=config.conductor.mismatch_patience
        )
        self.incarnation = 0
        self.run_id = ""
        self.ready = False
        """The book is found and the journalist writes: callers are answered."""
        self.journalist: Journalist
        self._changes: list[tuple[Member, bool]] = []
        self._files = ExitStack()

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        protos.add_ConductorServicer_to_server(Desk(self), server)
        return ("offbeat.v1.Conductor",)

    # Life.

    async def setup(self) -> None:
        """Open the ledger, find the book in it, read the data."""
        run, conductor = self.config.run, self.config.conductor
        self.ledger = Ledger(self.folder / "ledger.sqlite", synchronous=conductor.synchronous)
        self._files.callback(self.ledger.close)
        self.book = Book(
            group_size=run.group_size,
            with_baseline=self.config.trainer.algorithm.with_baseline,
            use_reference=self.config.use_reference,
            max_attempts=conductor.max_attempts,
            journal=self.ledger,
        )
        recovered = recover(self.book, self.ledger)
        self.journalist = Journalist(self.folder, self.book, self.config)
        self._files.callback(self.journalist.close)
        self.run_id = self._remember("run_id", self.process_id)
        self.incarnation = int(self.ledger.fact("incarnation", "0"))
        self.roster.evicted.update(json.loads(self.ledger.fact("evicted", "{}")))
        self._build_rules()
        self._build_evaluating()
        self._build_stages(life=int(self._remember("life", "0", add=1)))
        if recovered:
            self.journalist.tell("recovered", self.name, "the conductor found the run in its ledger", **self.progress())
            self._resume_stages()
        self.ready = True
        await self.serving(True)

    def _build_rules(self) -> None:
        """Who may work, on what."""
        self.sharing = Sharing(
            self.book,
            on=self.config.launch.time_sharing,
            members=lambda: self.roster.of("rollout"),
            post=self.post,
            tell=self.journalist.tell,
            on_problem=self.unturned,
            busy=lambda: self.evaluating.in_hand,
        )
        self.routing = Routing(
            self.roster,
            self.book,
            self.config.run,
            max_version_skew=self.config.push.max_version_skew,
            may_lease=self.sharing.may_lease,
        )

    def _build_evaluating(self) -> None:
        self.evaluating = Evaluating(
            self.config,
            self.book,
            self.ledger,
            self.journalist,
            self.routing,
            clock=asyncio.get_running_loop().time,
            post=self.post,
            on_end=self.stream_ended,
        )

    def _build_stages(self, *, life: int) -> None:
        clock = asyncio.get_running_loop().time
        conductor = self.config.conductor
        self.judging = Judging(
            self.book,
            max_attempts=conductor.max_score_attempts,
            post=self.post,
            on_quarantine=self.quarantine,
            on_end=self.stream_ended,
        )
        self.referring = Referring(self.book, post=self.post, on_quarantine=self.quarantine, on_end=self.stream_ended)
        self.generation = Generation(
            self.book,
            sampling=self.config.sampling(),
            run_seed=self.config.run.seed,
            life=life,
            lease_seconds=conductor.lease_seconds,
            next_prompt=self.config.prompts(),
            routing=self.routing,
            clock=clock,
            post=self.post,
            on_generated=self.generated,
            on_end=self.stream_ended,
            on_quarantine=self.quarantine,
            aside=self.evaluating,
        )
        self.training = Training(
            self.book,
            self.ledger,
            self.config.rules(),
            sharing=self.sharing,
            push_seconds=self.config.push.deadline_seconds,
            crew_size=self.config.crew_size,
            members=lambda: self.roster.of("rollout"),
            incarnation=lambda: self.incarnation,
            post=self.post,
            on_report=self.reported,
            on_stop=lambda report: self.ending.stop(report, self.journalist),
            on_push=self.pushed,
            on_checkpoint=self.checkpointed,
            on_end=self.stream_ended,
        )

        self.stages: dict[str, Stage] = {
            "rollout": self.generation,
            "reward": self.judging,
            "reference": self.referring,
            "trainer": self.training,
        }

    def _resume_stages(self) -> None:
        self.generated(list(self.book.samples(State.GENERATED, State.SCORED)))

    def _remember(self, name: str, default: str, *, add: int = 0) -> str:
        value = self.ledger.fact(name, default)
        value = str(int(value) + add) if add else value
        self.ledger.set_fact(name, value)
        return value

    async def work(self) -> None:
        """The loop: messages in, then every stage once."""
        ticker = asyncio.create_task(self._tick(), name="conductor-tick")
        try:
            while not self.finished.is_set():
                message = await self.mailbox.get()
                await asyncio.sleep(GATHER_SECONDS)
                message()
                while not self.mailbox.empty():
                    self.mailbox.get_nowait()()
                await self.pump()
            await farewell(self.roster.members)
            self.drain()
        finally:
            await cancel(ticker)

    async def pump(self) -> None:
        """One turn: batches out, questions out, leases out."""
        if self.ledger.problem is not None:
            raise self.ledger.problem
        await self._rewire()
        await self.training.pump()
        self.judging.pump()
        self.referring.pump()
        self.sharing.pump()
        self.evaluating.pump()
        if not self.paused:
            self.generation.pump()
        if self.book.accepted:
            self.journalist.start_clock()
        if self.routing.trained_all and self.evaluating.over():
            await self._finish()

    async def finish(self) -> None:
        """Close the streams and the ledger; what was in hand is found again at the next start."""
        for stage in (self.generation, self.judging, self.referring, self.training, self.sharing, self.evaluating):
            await stage.close()
        summary = self.evaluating.occasions.summary()
        self.journalist.summarize(
            self.status(), num_tokens=self.generation.num_tokens, evaluation=summary, stopped=self.ending.stopped
        )
        self.ending.check()

    async def close(self) -> None:
        """Stop answering, then commit and close the files, also after a setup or a loop that failed."""
        await super().close()
        self._files.close()

    # The flow.

    def generated(self, samples: list[Sample]) -> None:
        self.judging.want([sample for sample in samples if sample.state is State.GENERATED])
        self.referring.want([sample for sample in samples if self.book.lacks_reference(sample)])

    def reported(self, report: protos.StepReport, batch: Batch) -> None:
        self.journalist.step(report, batch)
        self.sharing.trained(report.step)
        for name, reason in self.health.judge(report, batch).items():
            self.evict(name, reason)

    def pushed(self, push: protos.PushReport) -> None:
        self.journalist.push(push)
        for member in self.roster.bring_up(push):
            self.sharing.pushed(member)
        for name, reason in push.failed.items():
            self.lose(name, f"push failed: {reason}")
        self.book.push(self.routing.floor(push.policy_version))

    def checkpointed(self, report: protos.CheckpointReport) -> None:
        self.journalist.checkpoint(report)
        if not report.problem:
            keep = self.config.conductor.keep_payload_steps
            self.ledger.prune(before_step=min(report.oldest_step + 1, max(report.step - keep, 0)))

    def quarantine(self, sample: Sample, reason: str) -> None:
        self.journalist.quarantine(sample, self.book.groups[sample.group], reason)
        self.book.quarantine(sample, reason)

    # Members.

    def admit(self, request: protos.JoinRequest) -> int:
        """Take a service in; returns the incarnation it lives under. ValueError where it is fenced off."""
        identity = request.identity
        if identity.role not in self.stages:
            raise ValueError(f"no such role: {identity.role!r}")
        if identity.role == "trainer":
            self._next_incarnation(request)
        member = self.roster.join(request, now=asyncio.get_running_loop().time())
        self.journalist.tell("joined", member.name, "joined", address=member.address, version=member.policy_version)
        self._changes.append((member, not member.evicted))
        self.post(lambda: None)
        return self.incarnation if identity.role == "trainer" else 0

    def _next_incarnation(self, request: protos.JoinRequest) -> None:
        """A new trainer process gets the next number, which fences off the older ones; a known one keeps its own."""
        if 0 < request.incarnation < self.incarnation:
            raise ValueError(
                f"trainer incarnation {request.incarnation} is fenced off:"
                f" incarnation {self.incarnation} has taken over"
            )
        if not request.incarnation:
            for member in list(self.roster.of("trainer")):
                self.lose(member.name, "another trainer has joined")
        self.incarnation = request.incarnation or self.incarnation + 1
        self.ledger.set_fact("incarnation", str(self.incarnation))

    def lose(self, name: str, reason: str) -> None:
        """A service is gone: its work goes to others as soon as the loop turns."""
        member = self.roster.lose(name, reason)
        if member is not None:
            kind = "left" if self.finished.is_set() else "lost"
            self.journalist.tell(kind, name, kind, why=reason)
            self._changes.append((member, False))

    def evict(self, name: str, reason: str) -> None:
        """Give a rollout server no more work: what it has in hand goes elsewhere. A new process may take its place."""
        member = self.roster.evict(name, reason)
        self.ledger.set_fact("evicted", json.dumps(self.roster.evicted))
        self.journalist.tell("evicted", name, "taken out of rotation until it is started again", why=reason)
        self._changes.append((member, False))
        if not any(self.roster.of("rollout")):
            self.journalist.tell("warning", self.name, "the run stands: every rollout server was taken out of rotation")

    def unturned(self, member: Member, problem: PeerError) -> None:
        """A rollout server has not slept or woken as it should: one that cannot gets no work, others may join again."""
        if self.roster.members.get(member.name) is not member:
            return
        if problem.code is grpc.StatusCode.FAILED_PRECONDITION:
            self.evict(member.name, str(problem))
        else:
            self.lose(member.name, str(problem))

    def stream_ended(self, name: str, reason: str) -> None:
        """The stream to a server has broken: it is lost, unless it has joined anew and waits for its next stream."""
        if not any(member.name == name and joined for member, joined in self._changes):
            self.lose(name, reason)

    async def _rewire(self) -> None:
        """Open and close streams for members that came and went."""
        while self._changes:
            member, joined = self._changes.pop(0)
            stage = self.stages[member.role]
            if joined:
                await stage.connect(member)
            else:
                await stage.drop(member.name, member.evicted or self.roster.lost.get(member.name, ""))
            await self.evaluating.rewire(member, joined=joined)
            if member.role == "rollout":
                self.training.want_sync()

    def post(self, message: Message) -> None:
        """Put something to do into the mailbox."""
        self.mailbox.put_nowait(message)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = loop.time()
            for member in self.roster.silent(now=now):
                self.lose(member.name, "no heartbeat")
            self.post(self.generation.expire)

    # The end.

    async def _finish(self) -> None:
        """Every step is trained and pushed: save, then let everybody go.

        A trainer that is lost over it is waited for: it makes the steps again that no checkpoint has.
        """
        if self.training.link is None:
            return
        try:
            seconds = self.config.trainer.checkpoint.deadline_seconds
            report = await self.training.save(deadline_seconds=seconds)
            self.checkpointed(report)
        except PeerError as error:
            self.journalist.tell("warning", self.name, "the last checkpoint was not saved", why=error)
            if error.code is grpc.StatusCode.UNAVAILABLE:
                return
        self.finished.set()
        self.journalist.tell("finished", self.name, "the run is finished", **self.progress())

    def progress(self) -> dict[str, Any]:
        return {"step": self.book.trained_step, "pushed": self.book.pushed_version, "accepted": self.book.accepted}

    def status(self) -> protos.ConductorStatusReply:
        return status_of(self)
