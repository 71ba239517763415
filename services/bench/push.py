"""A push from begin to commit into a rollout service, idle and while it decodes, beside the wire and vLLM's own way.

The trainer's end is this process, on the trainer's card: the real buckets, the real pusher. The weights change before
every push, and in the end the service must say that it holds exactly what was sent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import protos
from services.bench.bare.job import Baseline
from services.bench.bed import clean_folder, shape_settings, told
from services.bench.load import Load
from services.bench.report import keep, ranks, write
from services.bench.stand_in import rollout_service
from services.channel import call, connect
from services.commands.lineup import rollout_posts
from services.commands.placement import VARIABLE, placement, visible_gpus
from services.compose import load_config
from services.errors import OffbeatError
from services.launch import free_port
from services.serve import save_config

if TYPE_CHECKING:
    from services.bench.sender import Sender
    from services.config import Config
    from services.roster import Member

WARM_UP = 2
STEADY_SECONDS = 120.0
BASELINE_SECONDS = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushWork:
    """What is measured."""

    engine: str
    shape: str
    rounds: int
    decoding: int
    """Samples in flight during the second half; 0 leaves it out."""
    response_tokens: int
    pause_seconds: float
    """Between two pushes while decoding goes on."""
    bare: bool


@told
def bench_push(work: PushWork, overrides: list[str], *, folder: Path, out: Path | None) -> int:
    """Measure baselines, then the pushes; the JSON is there after each part."""
    import uvloop

    config = config_of(work, overrides, folder)
    run = clean_folder(config.run_folder)
    save_config(config, run)
    cards = placement(config, visible_gpus())
    figures: dict[str, Any] = {"work": {name: getattr(work, name) for name in work.__slots__}, "overrides": overrides}
    if "trainer" in cards:
        os.environ[VARIABLE] = cards["trainer"]  # before torch looks: this process is the trainer's end
    measured = Measured(config, run, work, cards, figures, out)
    uvloop.run(measured.of_service())
    if work.bare:
        measured.baseline("bare_broadcast", measured.of_wire)
    if work.bare and work.engine == "vllm" and "trainer" in cards:
        measured.baseline("vllm_own_transfer", measured.of_vllm)
    return write(out, "push", figures)


def config_of(work: PushWork, overrides: list[str], folder: Path) -> Config:
    """The recipe of benches with this work; later overrides win."""
    on_cpu = not visible_gpus()
    settings = [
        *shape_settings(work.shape, folder, dtype="float32" if on_cpu else "bfloat16"),
        *(["push.transport=auto"] if on_cpu else []),
        "run.name=push",
        f"run.folder={folder}",
        f"rollout.engine={work.engine}",
        f"rollout.max_num_seqs={max(work.decoding, 1)}",
        f"rollout.max_model_len={128 + work.response_tokens}",
        f"rollout.sampling.max_tokens={work.response_tokens}",
    ]
    return load_config("bench_loop", [*settings, *overrides])


@dataclass(frozen=True, slots=True)
class Measured:
    """The parts of the bench; each writes its figures when it is done."""

    config: Config
    run: Path
    work: PushWork
    cards: dict[str, str]
    figures: dict[str, Any]
    out: Path | None

    def note(self, name: str, value: object) -> None:
        self.figures[name] = value
        keep(self.out, "push", self.figures)

    # The service.

    async def of_service(self) -> None:
        """Pushes into an idle service, then into one that decodes."""
        from services.bench.sender import Sender

        async with rollout_service(self.config, self.run, gpus=self.cards.get("rollout-0")) as member:
            sender = Sender(self.config, self.run)
            self.note("num_bytes", sender.num_bytes)
            await sender.connect(member)
            try:
                await self._pushes(sender, WARM_UP)
                self.note("idle", summary(await self._pushes(sender, self.work.rounds)))
                if self.work.decoding:
                    await self._while_decoding(sender, member)
                await verify(sender, member)
                self.note("verified_version", sender.version)
            finally:
                await sender.close()

    async def _pushes(self, sender: Sender, count: int, *, pause_seconds: float = 0.0) -> list[dict[str, Any]]:
        found = []
        for _ in range(count):
            found.append(await sender.push())
            await asyncio.sleep(pause_seconds)
        return found

    async def _while_decoding(self, sender: Sender, member: Member) -> None:
        load = Load(self.config, self.run)
        sender.before_push = load.expect_version
        load.expect_version(sender.version)
        try:
            await load.connect(member)
            load.wants(lambda: load.in_hand(member.name) + self.config.run.group_size <= self.work.decoding)
            await load.until(lambda: load.num_samples >= self.work.decoding, seconds=STEADY_SECONDS)
            pushes = await self._pushes(sender, self.work.rounds, pause_seconds=self.work.pause_seconds)
            self.note("decoding", {**summary(pushes), "in_hand": load.in_hand(member.name)})
            load.wants(lambda: False)
        finally:
            await load.close()

    # The baselines.

    def baseline(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """A baseline that fails is told in its place: it does not take the figures with it."""
        try:
            self.note(name, measure())
        except OffbeatError as error:
            self.note(name, {"problem": str(error)})

    def apart(self) -> None:
        """OffbeatError where both ends share a card: NCCL takes one rank on each."""
        if "trainer" in self.cards and self.cards["trainer"] == self.cards.get("rollout-0"):
            raise OffbeatError("trainer and rollout server share a card: there is no wire between them")

    def of_wire(self) -> dict[str, Any]:
        """One broadcast of the same bytes between the same two cards."""
        self.apart()
        kind = "nccl" if "trainer" in self.cards and "rollout-0" in self.cards else "gloo"
        job = {"kind": kind, "port": free_port("127.0.0.1"), "num_bytes": self.figures["num_bytes"]}
        job["rounds"] = self.work.rounds
        ends = [
            Baseline("broadcast", {**job, "rank": rank}, folder=self.run / f"rank_{rank}", gpus=self.cards.get(name))
            for rank, name in enumerate(("trainer", "rollout-0"))
        ]
        answers = both(ends)
        if not answers[1]["arrived"]:
            raise OffbeatError("the bare broadcast did not bring what was sent")
        slower = [max(pair) for pair in zip(answers[0]["ms"], answers[1]["ms"], strict=True)]
        return {"kind": kind, "ms": ranks(slower)}

    def of_vllm(self) -> dict[str, Any]:
        """vLLM's own transfer of the same weights."""
        self.apart()
        job = {"config": str(self.run / "config.yaml"), "port": free_port("127.0.0.1"), "rounds": self.work.rounds}
        python = next(rollout_posts(self.config)).python
        ends = [
            Baseline(module, job, folder=self.run, gpus=self.cards[name], python=python)
            for module, name in (("vllm_receiver", "rollout-0"), ("vllm_sender", "trainer"))
        ]
        answer, _ = both(ends)
        parts = {name: ranks([part[name] for part in answer["parts_ms"]]) for name in ("start", "update", "finish")}
        return {"ms": ranks(answer["ms"]), "parts_ms": parts, "version": answer["version"]}


def both(ends: list[Baseline]) -> list[dict[str, Any]]:
    """The answers of two processes that work together; where one fails the other is ended."""
    try:
        return [end.answer(seconds=BASELINE_SECONDS) for end in ends]
    finally:
        for end in ends:
            end.end()


def summary(pushes: list[dict[str, Any]]) -> dict[str, Any]:
    """Ranks in milliseconds of a push and of its parts."""
    names = [name for name in pushes[0] if name.endswith("_ms")]
    return {
        "transport": "+".join(sorted({push["transport"] for push in pushes})),
        "pushes": len(pushes),
        **{name: ranks([push[name] for push in pushes]) for name in names},
    }


async def verify(sender: Sender, member: Member) -> None:
    """The service holds the last version, bit for bit."""
    channel = connect(member.address)
    try:
        ask = protos.RolloutStub(channel).Status
        status = await call(ask, protos.RolloutStatusRequest(), deadline_seconds=5.0, what="asking for the weights")
    finally:
        await channel.close()
    if (status.policy_version, status.weights_hash) != (sender.version, sender.hash()):
        raise OffbeatError(f"the service holds version {status.policy_version}, not what was sent as {sender.version}")
