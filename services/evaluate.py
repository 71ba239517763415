"""`offbeat eval`: greedy responses of a model to held-out prompts, judged by the recipe's rewards."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.config import Config
from services.errors import OffbeatError

if TYPE_CHECKING:
    from rollout.datasets import PromptRow
    from rollout.engine import Completion


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation came to."""

    accuracy: float
    """Share of prompts whose reward is at least 1 (the best value of a right-or-wrong reward)."""
    mean_reward: float
    num_prompts: int
    failures: int
    """Prompts without a reward; they count as wrong and are named in the file."""
    seconds: float


def print_evaluation(config: Config, *, split: str, limit: int, out: Path | None) -> int:
    """Evaluate and print one JSON line."""
    try:
        result = asyncio.run(evaluate(config, split=split, limit=limit, out=out))
    except (OffbeatError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"model": config.rollout.model, "split": split, **as_dict(result)}))
    return 0


def as_dict(result: Evaluation) -> dict[str, float]:
    return {
        "accuracy": round(result.accuracy, 4),
        "mean_reward": round(result.mean_reward, 4),
        "num_prompts": result.num_prompts,
        "failures": result.failures,
        "seconds": round(result.seconds, 3),
    }


async def evaluate(config: Config, *, split: str = "test", limit: int = 0, out: Path | None = None) -> Evaluation:
    """Greedy evaluation with the run's engine and reward functions."""
    from rollout.datasets import load_rows

    began = time.monotonic()
    data = config.data.model_copy(update={"split": split, "limit": limit or None})
    rows = load_rows(data).rows
    completions = await generate(config, rows)
    outcomes = await judge(config, rows, completions)
    if out is not None:
        write_responses(out, rows, completions, outcomes)
    rewards = [getattr(outcome, "value", 0.0) for outcome in outcomes]
    return Evaluation(
        accuracy=sum(reward >= 1.0 for reward in rewards) / len(rows),
        mean_reward=sum(rewards) / len(rows),
        num_prompts=len(rows),
        failures=sum(not hasattr(outcome, "value") for outcome in outcomes),
        seconds=time.monotonic() - began,
    )


async def generate(config: Config, rows: Sequence[PromptRow]) -> list[Completion]:
    """One greedy completion for each row, in the order of the rows."""
    from rollout.engine import Request
    from rollout.engines import load
    from rollout.sampling import SamplingParams
    from rollout.tokens import PromptEncoder

    settings = config.rollout
    encode = PromptEncoder(settings.model)
    sampling = SamplingParams(temperature=0.0, max_tokens=settings.sampling.max_tokens, stop=settings.sampling.stop)
    requests = [
        Request(request_id=index, prompt_ids=encode(row.text or "", row.messages or ()), sampling=sampling, seed=0)
        for index, row in enumerate(rows)
    ]
    engine = load(settings.engine).from_pretrained(settings.model, settings)  # type: ignore[attr-defined]
    await engine.start()
    try:
        engine.submit(requests)
        found: dict[int, Completion] = {}
        while len(found) < len(requests):
            found.update({completion.request_id: completion for completion in await engine.finished()})
    finally:
        await engine.close()
    return [found[index] for index in range(len(rows))]


async def judge(config: Config, rows: Sequence[PromptRow], completions: Sequence[Completion]) -> list[Any]:
    from reward.function import ScoreItem
    from reward.scorer import Scorer

    items = [
        ScoreItem(
            prompt=row.text or (row.messages[-1][1] if row.messages else ""),
            response=completion.text or "",
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            extra={**row.extra, "response_tokens": str(len(completion.token_ids))},
        )
        for row, completion in zip(rows, completions, strict=True)
    ]
    async with Scorer(config.reward) as scorer:
        return list(await scorer.score(items))


def write_responses(
    out: Path, rows: Sequence[PromptRow], completions: Sequence[Completion], outcomes: Sequence[Any]
) -> None:
    """One JSON line for each prompt: what was asked, answered, wanted and given for it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for row, completion, outcome in zip(rows, completions, outcomes, strict=True):
            record = {
                "prompt_id": row.prompt_id,
                "prompt": row.text if row.text is not None else list(row.messages or ()),
                "response": completion.text,
                "ground_truth": row.ground_truth,
                "reward": getattr(outcome, "value", None),
                "failure": getattr(outcome, "message", None),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
