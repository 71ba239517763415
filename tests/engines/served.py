"""An engine under test with a trainer's end of pushes beside it: real processes, real Gloo groups."""

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import protos
from rollout.config import RolloutConfig
from rollout.engine import Completion, Engine, Request, UpdateMode
from rollout.engines import load
from rollout.sampling import SamplingParams
from tests.engines.models import MAX_MODEL_LEN
from trainer.adapters.lora import low_rank_weights
from trainer.adapters.push import outgoing_of
from trainer.configs.lora import LoraConfig
from trainer.pushes.outgoing import Outgoing
from trainer.pushes.weights import Broadcaster, Crew, Receiving

SECONDS = 180.0
PUSH_SECONDS = 20.0
LONG = 600
"""Tokens of a sample that is meant to be unfinished when something happens to it."""
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "vllm": {"vllm": {"enforce_eager": True, "per_sample_seeds": True}},
    "sglang": {
        "sglang": {
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "deterministic": True,
            "mem_fraction_static": 0.3,
        }
    },
}
SERVER = "under-test"


def engine_config(name: str, folder: Path, **settings: Any) -> RolloutConfig:
    common = {"max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN, "dtype": "float32", "threads": 1}
    return RolloutConfig.model_validate(
        {"model": str(folder), "engine": name, **common, **OWN_SETTINGS.get(name, {}), **settings}
    )


@dataclass(slots=True)
class Served:
    """A started engine, the models that it may hold, and the sender that brings them."""

    engine: Engine
    base: Any
    other: Any
    tokenizer: Any
    sender: Broadcaster = field(default_factory=lambda: Broadcaster(host="127.0.0.1", incarnation=1))
    holds: Any = None
    version: int = 0
    ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def request(self, prompt: Iterable[int], *, seed: int = 0, **params: Any) -> Request:
        """Ids are never used twice."""
        sampling = SamplingParams(**({"max_tokens": 12} | params))
        return Request(request_id=next(self.ids), prompt_ids=tuple(map(int, prompt)), sampling=sampling, seed=seed)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit and wait; completions in the order of the requests, and none besides."""
        self.engine.submit(requests)
        return await self.collect(requests)

    async def collect(self, requests: Sequence[Request]) -> list[Completion]:
        """Wait for these completions and no others."""
        wanted = [request.request_id for request in requests]
        found: dict[int, Completion] = {}
        async with asyncio.timeout(SECONDS):
            while len(found) < len(wanted):
                found |= {one.request_id: one for one in await self.engine.finished()}
        assert sorted(found) == sorted(wanted)
        return [found[request_id] for request_id in wanted]

    async def under_way(self, requests: Sequence[Request]) -> Request:
        """Submit long requests with one short one that is generated beside them; return when that is finished.

        Then the others have some tokens and are not finished: `collect` will find them.
        """
        short = self.request(requests[0].prompt_ids, max_tokens=10, ignore_eos=True)
        self.engine.submit([*requests, short])
        await self.collect([short])
        return short

    async def hold(self, model: Any) -> None:
        """Make sure that the engine has the weights of this model."""
        if self.holds is not model:
            await self.push(model)

    async def push(self, model: Any, mode: UpdateMode = "keep") -> int:
        """A whole push; its version."""
        await self.arrive(model)
        return await self.swap(model, mode)

    async def arrive(self, model: Any, *, wrong: bool = False) -> None:
        """Everything of a push but the swap, as the pusher does it; `wrong` announces other checksums than it sends."""
        outgoing = self.outgoing(model)
        outgoing.pack()
        assert len(outgoing.buffers) > 2
        crew = self.crew()
        await self.engine.open_push(self.begin(crew, outgoing))
        sending = self.sender.send(crew, outgoing.on_host(), deadline_seconds=PUSH_SECONDS)
        async with asyncio.timeout(PUSH_SECONDS):
            await asyncio.wrap_future(sending)
        await self.engine.await_push([one ^ wrong for one in outgoing.checksums])

    def outgoing(self, model: Any) -> Outgoing:
        """All weights of a model; of one with an adapter the adapter alone."""
        lora = LoraConfig(push="adapter") if low_rank_weights(model) else None
        return outgoing_of(model, lora, bucket_bytes=2_000 if lora else 20_000, dtype=None, streamed=False)

    async def swap(self, model: Any, mode: UpdateMode) -> int:
        self.version += 1
        stood_still = await self.engine.swap(self.version, mode)
        assert 0 <= stood_still < PUSH_SECONDS
        self.holds = model
        return self.version

    def crew(self) -> Crew:
        return self.sender.crew("gloo", [Receiving(SERVER, self.engine.receivers)])

    def begin(self, crew: Crew, outgoing: Outgoing) -> protos.BeginPushRequest:
        return protos.BeginPushRequest(
            policy_version=self.version + 1,
            incarnation=1,
            manifest=outgoing.manifest,
            transport=protos.TRANSPORT_GLOO,
            rendezvous=crew.place(SERVER),
            deadline_seconds=PUSH_SECONDS,
        )

    async def dropped(self) -> None:
        """What the service and the pusher do after a push that failed."""
        self.sender.forget(self.crew())
        await self.engine.drop_push()


async def serve(name: str, folder: Path, **settings: Any) -> Engine:
    """Load and start; to be closed by the caller."""
    config = engine_config(name, folder, **settings)
    engine: Engine = await asyncio.to_thread(load(name).from_pretrained, str(folder), config)  # type: ignore[attr-defined]
    await engine.start()
    return engine


def text_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text)["input_ids"])


def version_spans(completion: Completion) -> list[tuple[int, int]]:
    """(version, number of tokens) of each span, which together make up the completion."""
    spans = [(span.policy_version, span.num_tokens) for span in completion.spans]
    assert sum(count for _, count in spans) == len(completion.token_ids) == len(completion.logprobs)
    return spans


def tokens_of(completions: Iterable[Completion]) -> list[list[int]]:
    return [one.token_ids.tolist() for one in completions]
