"""The work of a rollout bench, the same for the bare engine and for the service: prompts round by round."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.compose import load_config

if TYPE_CHECKING:
    from services.config import Config

Prompts = list[list[int]]
"""Token ids of every sample; the samples of a group hold the same."""


def config_of(job: dict[str, Any]) -> Config:
    return load_config(str(Path(job["config"])))


def rounds_of(config: Config, count: int) -> list[Prompts]:
    """What each round generates from: the prompts that a conductor would lease, in its order."""
    from rollout.tokens import PromptEncoder

    encode, next_prompt, run = PromptEncoder(config.rollout.model), config.prompts(), config.run
    ids = [encode(next_prompt(position).text).tolist() for position in range(count * run.prompts_per_step)]
    samples = [prompt for prompt in ids for _ in range(run.group_size)]
    size = run.prompts_per_step * run.group_size
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def timed(rounds: list[Prompts], generate: Callable[[Prompts], int]) -> list[float]:
    """Tokens a second of each round but the first, which is a warm-up; `generate` returns the tokens it has made."""
    rates = []
    for prompts in rounds:
        began = time.perf_counter()
        num_tokens = generate(prompts)
        rates.append(num_tokens / (time.perf_counter() - began))
    return rates[1:]
