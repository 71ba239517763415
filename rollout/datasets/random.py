"""Prompts for benches: random words of the word tokenizer, each with a budget of response tokens where asked.

"t17 t4 t93": one token a word, so that a prompt has exactly as many tokens as words. What stands in them means nothing.
"""

import math
import random

from rollout.datasets.row import BUDGET, PromptRow

DATA_SOURCE = "offbeat/random"
DEFAULT_SIZE = 1024


def random_rows(
    *,
    size: int | None = None,
    prompt_tokens: int = 128,
    words: int = 151_000,
    response_mean: float | None = None,
    response_sigma: float = 1.0,
    response_min: int = 1,
    response_max: int = 512,
    seed: int = 0,
) -> tuple[PromptRow, ...]:
    """`size` (default 1024) prompts of `prompt_tokens` words drawn from "t0" to "t<words - 1>", the same for a seed.

    With `response_mean` each prompt carries a budget of response tokens: log-normal, clipped to [response_min,
    response_max]; its mu is chosen so that the clipped values have that mean. ValueError where the mean cannot be.
    """
    draw = random.Random(seed)
    if response_mean is None:
        return tuple(_row(index, draw, prompt_tokens, words, {}) for index in range(size or DEFAULT_SIZE))
    low, high = response_min, response_max
    mu = clipped_mu(response_mean, sigma=response_sigma, low=low, high=high)
    budgets = (drawn(draw, mu, sigma=response_sigma, low=low, high=high) for _ in range(size or DEFAULT_SIZE))
    return tuple(_row(index, draw, prompt_tokens, words, {BUDGET: str(one)}) for index, one in enumerate(budgets))


def drawn(draw: random.Random, mu: float, *, sigma: float, low: int, high: int) -> int:
    """One length in tokens: exp(normal(mu, sigma)), rounded, clipped to [low, high]."""
    return round(min(max(draw.lognormvariate(mu, sigma), low), high))


def clipped_mu(mean: float, *, sigma: float, low: float, high: float) -> float:
    """The mu for which exp(normal(mu, sigma)), clipped to [low, high], has this mean; by bisection. ValueError."""
    if not low < mean < high:
        raise ValueError(f"response_mean={mean:g} must lie between response_min={low:g} and response_max={high:g}")
    below, above = math.log(low) - 10 * sigma, math.log(high) + 10 * sigma
    for _ in range(100):
        middle = (below + above) / 2
        if clipped_mean(middle, sigma=sigma, low=low, high=high) < mean:
            below = middle
        else:
            above = middle
    return (below + above) / 2


def clipped_mean(mu: float, *, sigma: float, low: float, high: float) -> float:
    """Mean of exp(normal(mu, sigma)) clipped to [low, high]: what lies below, above and between, in closed form."""
    under, over = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
    between = math.exp(mu + sigma**2 / 2) * (_share_below(over - sigma) - _share_below(under - sigma))
    return low * _share_below(under) + high * (1 - _share_below(over)) + between


def _share_below(deviations: float) -> float:
    """Of a standard normal."""
    return (1 + math.erf(deviations / math.sqrt(2))) / 2


def _row(index: int, draw: random.Random, prompt_tokens: int, words: int, extra: dict[str, str]) -> PromptRow:
    text = " ".join(f"t{draw.randrange(words)}" for _ in range(prompt_tokens))
    return PromptRow(prompt_id=f"random/{index}", text=text, ground_truth="", data_source=DATA_SOURCE, extra=extra)
