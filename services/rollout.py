"""The rollout service: leases in, trajectories out, and new weights between two tokens."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

import protos
from protos.arrays import from_array, to_array
from services.errors import OffbeatError
from services.faults import fault
from services.pushes.reach import reach_of_engine
from services.pushes.receiving import Receiving
from services.streams import Outbox
from services.worker import Worker

if TYPE_CHECKING:
    from rollout.engine import Completion, Engine, Request

logger = logging.getLogger(__name__)
STOP_REASONS = {
    "eos": protos.STOP_REASON_EOS,
    "length": protos.STOP_REASON_LENGTH,
    "stop": protos.STOP_REASON_STOP,
}


@dataclass(slots=True)
class Job:
    """A leased sample in the engine."""

    key: protos.SampleKey
    lease_id: int
    attempt: int
    baseline: bool
    prompt_ids: protos.Array
    started: float


class RolloutService(Worker, Receiving, protos.RolloutServicer):
    """Serves one engine to one conductor at a time."""

    role = "rollout"

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        protos.add_RolloutServicer_to_server(self, server)
        return ("offbeat.v1.Rollout",)

    # Life.

    async def prepare(self) -> None:
        config = self.config.rollout
        self.engine: Engine = await self.load(self._load)
        await self.engine.start()
        self.identity.capabilities.extend((f"engine:{config.engine}", *reach_of_engine(self.engine).capabilities()))
        self.start_awake()
        self.start_receiving(config.update_mode)
        self._jobs: dict[int, Job] = {}
        self._ids = itertools.count(1)
        self._outbox: Outbox[protos.GenerateReply] | None = None
        self._num_tokens = 0
        self._credit = 2 * config.max_num_seqs

    def _load(self) -> Engine:
        from rollout.engines import load
        from rollout.tokens import PromptEncoder
        from trainer.model.load import model_fingerprint

        config = self.config.rollout
        engine: Engine = load(config.engine).from_pretrained(config.model, config)  # type: ignore[attr-defined]
        self._encode = PromptEncoder(config.model)
        self.identity.model_hash = model_fingerprint(config.model)
        return engine

    def state(self) -> protos.JoinRequest:
        return protos.JoinRequest(policy_version=self.engine.policy_version, has_version=self.has_version)

    def in_hand(self) -> int:
        return len(self._jobs)

    async def finish(self) -> None:
        """Hand back what has not been finished: another server begins it anew."""
        await self.engine.pause()
        nacks = [self._nack(job, "draining", "the server is leaving") for job in self._jobs.values()]
        self._jobs.clear()
        if nacks and self._outbox is not None:
            self._outbox.put(protos.GenerateReply(nacks=nacks))
            await asyncio.sleep(0.2)  # the stream writes it before the server stops
        await self.engine.close()

    async def serve(self) -> None:
        """Take what the engine has finished and send it on, as much at once as there is."""
        try:
            while True:
                self._send(await self.engine.finished())
        except RuntimeError as error:
            await self.serving(False)
            raise OffbeatError(f"{self.name}: generation failed: {error}") from error

    # Generation.

    async def Generate(
        self, request_iterator: AsyncIterator[protos.GenerateRequest], context: Any
    ) -> AsyncIterator[protos.GenerateReply]:
        await self._forget_jobs()
        outbox: Outbox[protos.GenerateReply] = Outbox()
        self._outbox = outbox
        outbox.put(protos.GenerateReply(credit=protos.Credit(samples=self._credit)))
        async for reply in outbox.replies(self._read(request_iterator, outbox)):
            yield reply

    async def _read(
        self, request_iterator: AsyncIterator[protos.GenerateRequest], outbox: Outbox[protos.GenerateReply]
    ) -> None:
        async for request in request_iterator:
            if request.leases:
                self._begin(request.leases, outbox)
            if request.cancels:
                await self._cancel({place_of(key) for key in request.cancels})

    async def _forget_jobs(self) -> None:
        """A new stream voids the leases of the old one."""
        forgotten, self._jobs = list(self._jobs), {}
        if forgotten:
            await self.engine.abort(forgotten)

    def _begin(self, leases: Sequence[protos.GroupLease], outbox: Outbox[protos.GenerateReply]) -> None:
        requests, nacks = [], []
        for lease in leases:
            try:
                requests.extend(self._requests(lease))
            except ValueError as error:
                nacks.extend(refusals(lease, str(error)))
        if requests:
            self.engine.submit(requests)
        if nacks:
            outbox.put(protos.GenerateReply(nacks=nacks, credit=protos.Credit(samples=len(nacks))))
        fault(self.name, "rollout.leased")
        if any(lease.evaluation for lease in leases):
            fault(self.name, "rollout.evaluation")

    def _requests(self, lease: protos.GroupLease) -> list[Request]:
        """The requests of one group; ValueError where its prompt cannot be generated from."""
        from rollout.engine import Request, check_request

        prompt_ids = self._encode(lease.prompt.text, [(turn.role, turn.content) for turn in lease.prompt.messages])
        sampling = sampling_of(lease.sampling)
        made = []
        for seed in lease.seeds:
            request = Request(request_id=next(self._ids), prompt_ids=prompt_ids, sampling=sampling, seed=seed)
            check_request(request, vocab_size=self.engine.vocab_size, max_model_len=self.engine.max_model_len)
            made.append(request)
        array, now = to_array(prompt_ids), time.monotonic()
        for request, index, attempt in zip(made, lease.indices, lease.attempts, strict=True):
            key = protos.SampleKey(group=lease.group, index=index, evaluation=lease.evaluation)
            self._jobs[request.request_id] = Job(key, lease.lease_id, attempt, lease.baseline, array, now)
        return made

    async def _cancel(self, places: set[tuple[int, int, int]]) -> None:
        ids = [request_id for request_id, job in self._jobs.items() if place_of(job.key) in places]
        for request_id in ids:
            del self._jobs[request_id]
        if ids:
            await self.engine.abort(ids)
            self._grant(len(ids))

    def _grant(self, samples: int) -> None:
        if self._outbox is not None:
            self._outbox.put(protos.GenerateReply(credit=protos.Credit(samples=samples)))

    def _send(self, completions: list[Completion]) -> None:
        done = [(job, completion) for completion in completions if (job := self._jobs.pop(completion.request_id, None))]
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        self._num_tokens += num_tokens
        if not done or self._outbox is None:
            return
        reply = protos.GenerateReply(
            trajectories=[self._trajectory(job, completion) for job, completion in done],
            credit=protos.Credit(samples=len(done)),
            num_generated_tokens=num_tokens,
        )
        word = fault(self.name, "rollout.reply")
        if word == "liar":
            reply.trajectories[0].behaviour_logprobs.CopyFrom(to_array(completions[0].logprobs.repeat(2)))
        if word == "shift":
            for trajectory in reply.trajectories:
                trajectory.behaviour_logprobs.CopyFrom(to_array(from_array(trajectory.behaviour_logprobs) - 0.5))
        self._outbox.put(reply)
        if word == "duplicate":
            self._outbox.put(protos.GenerateReply(trajectories=reply.trajectories))

    def _trajectory(self, job: Job, completion: Completion) -> protos.Trajectory:
        spans = [
            protos.VersionSpan(policy_version=span.policy_version, num_tokens=span.num_tokens)
            for span in completion.spans
        ]
        return protos.Trajectory(
            key=job.key,
            lease_id=job.lease_id,
            attempt=job.attempt,
            prompt_ids=job.prompt_ids,
            response_ids=to_array(completion.token_ids),
            behaviour_logprobs=to_array(completion.logprobs),
            spans=spans,
            stop_reason=STOP_REASONS.get(str(completion.stop_reason), protos.STOP_REASON_UNSPECIFIED),
            response_text=completion.text or "",
            server=self.name,
            generate_seconds=time.monotonic() - job.started,
            baseline=job.baseline,
        )

    def _nack(self, job: Job, reason: str, detail: str) -> protos.Nack:
        return protos.Nack(key=job.key, lease_id=job.lease_id, reason=reason, detail=detail)

    # Control.

    async def Pause(self, request: protos.PauseRequest, context: Any) -> protos.PauseReply:
        await self.engine.pause()
        return protos.PauseReply(num_running=len(self._jobs))

    async def Resume(self, request: protos.ResumeRequest, context: Any) -> protos.ResumeReply:
        await self.engine.resume()
        return protos.ResumeReply()

    async def Status(self, request: protos.RolloutStatusRequest, context: Any) -> protos.RolloutStatusReply:
        return protos.RolloutStatusReply(
            name=self.name,
            engine=self.config.rollout.engine,
            serving=self.has_version and self.engine.healthy and not self.asleep,
            policy_version=self.engine.policy_version,
            num_running=len(self._jobs),
            num_tokens=self._num_tokens,
            weights_hash=self.weights_hash,
            asleep=self.asleep,
        )


def place_of(key: protos.SampleKey) -> tuple[int, int, int]:
    return key.evaluation, key.group, key.index


def sampling_of(params: protos.SamplingParams) -> Any:
    from rollout.sampling import SamplingParams

    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        stop=tuple(params.stop),
        ignore_eos=params.ignore_eos,
    )


def refusals(lease: protos.GroupLease, detail: str) -> list[protos.Nack]:
    """A prompt that cannot be generated from will not be better on another server."""
    return [
        protos.Nack(
            key=protos.SampleKey(group=lease.group, index=index, evaluation=lease.evaluation),
            lease_id=lease.lease_id,
            reason="unfit_prompt",
            detail=detail,
            permanent=True,
        )
        for index in lease.indices
    ]
