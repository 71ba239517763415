"""`offbeat eval`: samples of a model to the prompts of a recipe or a data file, judged by reward functions.

pass@1, pass@k and majority vote (services/evaluation/verdicts.py). A majority is taken over what the reward read as the
answer (`answer` of its Score, "pred" of a verl function); where it reads none, over equal response texts. A sample that
a reward failed on has no verdict: it is left out of every figure, counted and told.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, get_args

from rollout.datasets.arithmetic import Split
from services.commands.candidate import compose, model_folder, own_recipe
from services.commands.responses import Answered, generate, judge
from services.config import Config
from services.configs.evaluation import split_of
from services.errors import ConfigError, OffbeatError
from services.evaluation.verdicts import figures

if TYPE_CHECKING:
    from rollout.sampling import SamplingParams

SHOWN_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of the command."""

    model: str
    recipe: str | None = None
    data: Path | None = None
    reward: str | None = None
    engine: str | None = None
    split: str = "test"
    num_prompts: int = 0
    samples_per_prompt: int | None = None
    k: str = "1"
    """Numbers, with commas between."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    threshold: float | None = None
    seed: int = 0

    def ks(self) -> list[int]:
        """ValueError for what is no list of numbers from 1 on."""
        parts = self.k.split(",")
        if not all(part.strip().isdecimal() and int(part) for part in parts):
            raise ValueError(f"--k {self.k}: write numbers from 1 on with commas between, e.g. 1,4,8")
        return [int(part) for part in parts]


def run_evaluation(asked: Asked, *, overrides: Sequence[str], out: Path | None, summary: Path | None) -> int:
    """Evaluate, write what was asked for and print one JSON line; the exit code."""
    from reward.function import RewardError

    try:
        with model_folder(asked.model) as folder:
            config = compose(
                folder,
                recipe=asked.recipe or own_recipe(asked.model),
                data=asked.data,
                reward=asked.reward,
                engine=asked.engine,
                overrides=overrides,
            )
            told, samples = asyncio.run(evaluate(config, asked))
        write(out, (json.dumps(sample.record(told["threshold"]), ensure_ascii=False) for sample in samples))
        write(summary, [json.dumps(told, indent=2)])
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except (OffbeatError, RewardError, RuntimeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    tell_failures(samples)
    print(json.dumps(told))
    return 0 if "pass@1" in told else 1


async def evaluate(config: Config, asked: Asked) -> tuple[dict[str, Any], list[Answered]]:
    """The summary, and the samples in the order of the prompts."""
    from rollout.datasets import load_rows

    began = time.monotonic()
    if asked.split not in get_args(Split):
        raise ValueError(f"--split {asked.split}: there are {' and '.join(get_args(Split))}")
    ks = asked.ks()
    split: Split = "train" if asked.split == "train" else "test"
    data = split_of(config.evaluation.data or config.data, split, num_prompts=asked.num_prompts)
    rows = load_rows(data).rows
    num_samples = max(ks) if asked.samples_per_prompt is None else asked.samples_per_prompt
    sampling = sampling_of(config, asked, num_samples=num_samples)
    samples = await generate(config.rollout, rows, sampling, num_samples=num_samples, seed=asked.seed)
    await judge(config.reward, samples)
    threshold = config.evaluation.threshold if asked.threshold is None else asked.threshold
    prompts = [samples[at : at + num_samples] for at in range(0, len(samples), num_samples)]
    verdicts = [[verdict for sample in prompt for verdict in sample.verdicts()] for prompt in prompts]
    made = [sample.completion for sample in samples if sample.completion is not None]
    told: dict[str, Any] = {
        "model": asked.model,
        "split": asked.split,
        **figures(verdicts, ks=ks, threshold=threshold),
        "num_prompts": len(rows),
        "samples_per_prompt": num_samples,
        "failures": dict(Counter(sample.failure.partition(":")[0] for sample in samples if sample.failure)),
        "response_length_mean": fmean(len(one.token_ids) for one in made) if made else 0.0,
        "truncation_rate": fmean(one.stop_reason == "length" for one in made) if made else 0.0,
        "threshold": threshold,
        **{key: value for key, value in asdict(sampling).items() if key in ("temperature", "top_p", "max_tokens")},
        "seed": asked.seed,
        "seconds": time.monotonic() - began,
    }
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in told.items()}, samples


def sampling_of(config: Config, asked: Asked, *, num_samples: int) -> SamplingParams:
    """As the recipe says, but greedy where one sample is drawn; what was asked for comes first. ValueError."""
    from rollout.sampling import SamplingParams

    if max(asked.ks()) > num_samples:
        raise ValueError(f"--k {asked.k}: only {num_samples} samples are drawn for a prompt")
    settings = config.rollout.sampling
    usual = settings.temperature if num_samples > 1 else 0.0
    temperature = usual if asked.temperature is None else asked.temperature
    if temperature == 0 and num_samples > 1:
        raise ValueError(f"temperature 0 draws one sample again and again: {num_samples} of them say no more than one")
    return SamplingParams(
        temperature=temperature,
        top_p=settings.top_p if asked.top_p is None else asked.top_p,
        top_k=settings.top_k,
        max_tokens=asked.max_tokens or settings.max_tokens,
        stop=settings.stop,
    )


def tell_failures(samples: Sequence[Answered]) -> None:
    """What has no verdict, on stderr."""
    failed = [sample for sample in samples if sample.failure]
    if failed:
        print(f"{len(failed)} of {len(samples)} samples have no verdict and are in no figure:", file=sys.stderr)
    for sample in failed[:SHOWN_FAILURES]:
        print(f"  {sample.row.prompt_id}[{sample.index}]: {sample.failure}", file=sys.stderr)


def write(path: Path | None, lines: Iterable[str]) -> None:
    """A file of these lines, where one is wanted."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
