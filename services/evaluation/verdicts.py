"""What many samples of each prompt say of a model: pass@k and majority vote, by the rewards that they were given.

A sample without a reward (a failed reward function) has no verdict: it is counted elsewhere and enters no figure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judged sample."""

    reward: float
    vote: str | None
    """What it votes for in a majority; None: it has no vote."""


def vote_of(answer: str | None, response: str) -> str | None:
    """What the reward read as the answer; where it reads none, the response itself, stripped.

    A response in which such a reward found no answer ("") has no vote.
    """
    return response.strip() if answer is None else answer or None


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the unbiased chance that one of k samples is correct (Chen et al. 2021).

    `num_samples` of one prompt were drawn, of which `num_correct` are correct; ValueError for k outside 1 to n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_is_correct(verdicts: Sequence[Verdict], *, threshold: float) -> bool:
    """Whether the most frequent vote is one that the reward calls correct; of equal counts the one that came first.

    Samples with one vote may have several rewards (a format counts, too): the first of them speaks. No vote is wrong.
    """
    votes = Counter(verdict.vote for verdict in verdicts if verdict.vote is not None)
    if not votes:
        return False
    winner, _ = votes.most_common(1)[0]
    return next(verdict.reward for verdict in verdicts if verdict.vote == winner) >= threshold


def figures(prompts: Iterable[Sequence[Verdict]], *, ks: Iterable[int], threshold: float) -> dict[str, float]:
    """pass@1, pass@k, maj@k (over the first k samples) and mean_reward; a reward from `threshold` on is correct.

    Each is a mean over the prompts that have k judged samples; a figure that no prompt allows is left out.
    """
    judged = [verdicts for verdicts in prompts if verdicts]
    found: dict[str, float] = {}
    for k in sorted({1, *ks}):
        able = [verdicts for verdicts in judged if len(verdicts) >= k]
        if not able:
            continue
        correct = [sum(verdict.reward >= threshold for verdict in verdicts) for verdicts in able]
        found[f"pass@{k}"] = fmean(pass_at_k(len(one), right, k) for one, right in zip(able, correct, strict=True))
        if k > 1:
            found[f"maj@{k}"] = fmean(majority_is_correct(one[:k], threshold=threshold) for one in able)
    if judged:
        found["mean_reward"] = fmean(verdict.reward for verdicts in judged for verdict in verdicts)
    return found
