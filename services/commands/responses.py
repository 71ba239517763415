"""Responses of an engine to prompts, outside of any run, and their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from services.evaluation.verdicts import Verdict, vote_of
from services.stages.generation import seed_of

if TYPE_CHECKING:
    from reward.config import RewardConfig
    from reward.function import Score
    from rollout.config import RolloutConfig
    from rollout.datasets import PromptRow
    from rollout.engine import Completion, Engine, Request
    from rollout.sampling import SamplingParams


@dataclass(slots=True)
class Answered:
    """One sample and what became of it."""

    row: PromptRow
    index: int
    completion: Completion | None = None
    score: Score | None = None
    failure: str = ""
    """Why there is no score, as `kind: message`."""

    @property
    def text(self) -> str:
        """The response."""
        return "" if self.completion is None else self.completion.text or ""

    def verdicts(self) -> list[Verdict]:
        """One, or none where there is no score."""
        return [] if self.score is None else [Verdict(self.score.value, vote_of(self.score.answer, self.text))]

    def record(self, threshold: float) -> dict[str, Any]:
        """What was asked, answered, wanted and given for it; for a file."""
        row, completion, score = self.row, self.completion, self.score
        return {
            "prompt_id": row.prompt_id,
            "index": self.index,
            "prompt": row.text if row.text is not None else list(row.messages or ()),
            "response": None if completion is None else self.text,
            "num_tokens": 0 if completion is None else len(completion.token_ids),
            "stop_reason": None if completion is None else str(completion.stop_reason),
            "ground_truth": row.ground_truth,
            "reward": None if score is None else score.value,
            "breakdown": None if score is None else dict(score.breakdown),
            "answer": None if score is None else score.answer,
            "correct": None if score is None else score.value >= threshold,
            "failure": self.failure or None,
        }


async def generate(
    settings: RolloutConfig, rows: Sequence[PromptRow], sampling: SamplingParams, *, num_samples: int, seed: int
) -> list[Answered]:
    """`num_samples` for each row, in the order of the rows; a seed gives the same. RuntimeError from the engine."""
    from rollout.engines import load
    from rollout.tokens import PromptEncoder

    samples = [Answered(row, index) for row in rows for index in range(num_samples)]
    encode = PromptEncoder(settings.model)
    engine: Engine = load(settings.engine).from_pretrained(settings.model, settings)  # type: ignore[attr-defined]
    await engine.start()
    try:
        requests: list[Request] = []
        for at in range(0, len(samples), num_samples):
            requests += requests_for(samples[at : at + num_samples], at, encode, sampling, engine=engine, seed=seed)
        engine.submit(requests)
        left = len(requests)
        while left:
            finished = await engine.finished()
            left -= len(finished)
            for completion in finished:
                samples[completion.request_id].completion = completion
    finally:
        await engine.close()
    return samples


def requests_for(
    samples: Sequence[Answered], at: int, encode: Any, sampling: SamplingParams, *, engine: Engine, seed: int
) -> list[Request]:
    """The requests for one prompt, numbered from `at`; none, and a failure of each, where it cannot be generated from.

    A prompt that leaves less room than max_tokens gets what room there is.
    """
    from rollout.datasets.row import BUDGET
    from rollout.engine import Request, check_request

    row = samples[0].row
    prompt_ids = encode(row.text or "", row.messages or ())
    most = min(sampling.max_tokens, int(row.extra.get(BUDGET, sampling.max_tokens)))
    own = replace(sampling, max_tokens=max(min(most, engine.max_model_len - len(prompt_ids)), 1))
    made = [
        Request(
            request_id=at + sample.index,
            prompt_ids=prompt_ids,
            sampling=own,
            seed=seed_of(seed, at // len(samples), sample.index),
        )
        for sample in samples
    ]
    try:
        check_request(made[0], vocab_size=engine.vocab_size, max_model_len=engine.max_model_len)
    except ValueError as error:
        for sample in samples:
            sample.failure = f"unfit_prompt: {error}"
        return []
    return made


async def judge(config: RewardConfig, samples: Sequence[Answered]) -> None:
    """Give every sample its score, or its failure. RewardError where no reward can be had."""
    from reward.function import Failure, ScoreItem
    from reward.scorer import Scorer

    answered = [sample for sample in samples if sample.completion is not None]
    items = [
        ScoreItem(
            prompt=asked(sample.row),
            response=sample.text,
            ground_truth=sample.row.ground_truth,
            data_source=sample.row.data_source,
            extra={**sample.row.extra, "response_tokens": str(len(sample.completion.token_ids))},
        )
        for sample in answered
        if sample.completion is not None
    ]
    async with Scorer(config) as scorer:
        outcomes = await scorer.score(items)
    for sample, outcome in zip(answered, outcomes, strict=True):
        if isinstance(outcome, Failure):
            sample.failure = f"reward_{outcome.kind}: {outcome.message}"
        else:
            sample.score = outcome


def asked(row: PromptRow) -> str:
    """What a reward sees of a prompt: its text, or the last message of the user, as in services/stages/judging.py."""
    turns = row.messages or ()
    users = [content for role, content in turns if role == "user"]
    return row.text or (users[-1] if users else turns[-1][1] if turns else "")
