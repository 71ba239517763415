"""Advantage estimators against their formulas written out one sample and one token at a time, in float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.advantages import ESTIMATORS, AdvantageInputs, AdvantageOptions, gae

GAMMA, LAM = 0.9, 0.8
OPTIONS = AdvantageOptions(gamma=GAMMA, lam=LAM, part_weights=(1.0, -0.5), reward_weight=0.25)
Row = list[float]


@dataclass
class Sample:
    """One sample in plain Python; every list has the batch's width."""

    group: int
    rewards: Row
    mask: Row
    logprobs: Row
    squares: Row
    """Sums of squared probabilities; also stand for the critic's values."""
    weights: Row
    """Of the loss; also stand for the teacher's logprobs."""
    parts: Row

    @property
    def score(self) -> float:
        return sum(self.rewards)

    @property
    def length(self) -> int:
        return int(sum(self.mask))

    def returns(self) -> Row:
        counted = [reward * keep for reward, keep in zip(self.rewards, self.mask, strict=True)]
        return [sum(counted[t:]) for t in range(len(counted))]


# The formulas, transcribed.


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def group_of(sample: Sample, batch: list[Sample]) -> list[Sample]:
    return [other for other in batch if other.group == sample.group]


def spread(scores: list[float], batch: list[Sample]) -> list[Row]:
    return [[score * keep for keep in sample.mask] for score, sample in zip(scores, batch, strict=True)]


def whitened(rows: list[Row], batch: list[Sample], *, masked: bool = True) -> list[Row]:
    counted = [x for row, s in zip(rows, batch, strict=True) for x, keep in zip(row, s.mask, strict=True) if keep]
    middle = sum(counted) / (len(counted) + 1e-8)
    variance = sum((x - middle) ** 2 for x in counted) / (len(counted) + 1e-8) * len(counted) / (len(counted) - 1)
    moved = [[(x - middle) / math.sqrt(variance + 1e-8) for x in row] for row in rows]
    if not masked:
        return moved
    return [[x * keep for x, keep in zip(row, s.mask, strict=True)] for row, s in zip(moved, batch, strict=True)]


def normed(value: float, values: list[float]) -> float:
    return value / (1 + 1e-6) if len(values) == 1 else (value - mean(values)) / (deviation(values) + 1e-6)


def centred(sample: Sample, batch: list[Sample]) -> float:
    scores = [other.score for other in group_of(sample, batch)]
    return sample.score - (mean(scores) if len(scores) > 1 else 0.0)


def plain_grpo(batch: list[Sample]) -> list[Row]:
    return spread([normed(s.score, [other.score for other in group_of(s, batch)]) for s in batch], batch)


def plain_passk(batch: list[Sample]) -> list[Row]:
    found = [0.0] * len(batch)
    for number in {sample.group for sample in batch}:
        rows = [row for row, sample in enumerate(batch) if sample.group == number]
        first, second = sorted(rows, key=lambda row: -batch[row].score)[:2]
        std = deviation([batch[row].score for row in rows])
        found[first] = (batch[first].score - batch[second].score) / (std + 1e-6)
    return spread(found, batch)


def plain_rloo(batch: list[Sample]) -> list[Row]:
    sizes = [len(group_of(sample, batch)) for sample in batch]
    scale = [size / (size - 1) if size > 1 else 1.0 for size in sizes]
    return spread([factor * centred(sample, batch) for factor, sample in zip(scale, batch, strict=True)], batch)


def plain_opo(batch: list[Sample]) -> list[Row]:
    found = []
    for sample in batch:
        group = group_of(sample, batch)
        total = sum(other.length for other in group)
        baseline = sum(other.length * other.score for other in group) / total if len(group) > 1 and total else 0.0
        found.append(sample.score - baseline)
    return spread(found, batch)


def plain_gpg(batch: list[Sample]) -> list[Row]:
    alpha = len(batch) / max(sum(sample.score != 0 for sample in batch), 1)
    return spread([alpha * centred(sample, batch) for sample in batch], batch)


def plain_reinforce(batch: list[Sample]) -> list[Row]:
    return [[sum(s.rewards[t:]) * keep for t, keep in enumerate(s.mask)] for s in batch]


def plain_reinforce_plus_plus(batch: list[Sample]) -> list[Row]:
    rows = []
    for sample in batch:
        row, carried = [0.0] * len(sample.mask), 0.0
        for t in reversed(range(len(row))):
            fresh = sample.rewards[t] + GAMMA * carried
            row[t] = fresh * sample.mask[t]
            carried = fresh * sample.mask[t] + carried * (1 - sample.mask[t])
        rows.append(row)
    return whitened(rows, batch)


def plain_baseline(batch: list[Sample]) -> list[Row]:
    return whitened(spread([centred(sample, batch) for sample in batch], batch), batch)


def plain_remax(batch: list[Sample]) -> list[Row]:
    return [[value - s.parts[0] * keep for value, keep in zip(s.returns(), s.mask, strict=True)] for s in batch]


def plain_gdpo(batch: list[Sample]) -> list[Row]:
    found = [0.0] * len(batch)
    for k, weight in enumerate(OPTIONS.part_weights):
        for row, sample in enumerate(batch):
            found[row] += weight * normed(sample.parts[k], [other.parts[k] for other in group_of(sample, batch)])
    return whitened(spread(found, batch), batch)


def plain_token_baseline(batch: list[Sample]) -> list[Row]:
    found = []
    for sample in batch:
        group = group_of(sample, batch)
        lengths = sorted((other.length for other in group), reverse=True)
        reach = lengths[1] if len(group) > 1 and sample.length == lengths[0] else len(sample.mask)
        row = []
        for t, value in enumerate(sample.returns()):
            ways = [path_variance(other, t) * other.mask[t] for other in group]
            above = sum(other.returns()[t] * way for other, way in zip(group, ways, strict=True))
            baseline = above / (sum(ways) + 1e-8) if t < reach or lengths[0] == lengths[1] else 0.0
            row.append((value - baseline) * sample.mask[t])
        found.append(row)
    return found


def path_variance(sample: Sample, t: int) -> float:
    parts = zip(sample.logprobs, sample.squares, sample.weights, sample.mask, strict=True)
    return sum([(1 - 2 * math.exp(lp) + square) * weight**2 * keep for lp, square, weight, keep in parts][: t + 1])


def plain_tir_baseline(batch: list[Sample]) -> list[Row]:
    compact = [moved_together(sample) for sample in batch]
    found = plain_token_baseline(compact)
    rows = []
    for sample, row in zip(batch, found, strict=True):
        values = iter(row)
        rows.append([next(values) if keep else 0.0 for keep in sample.mask])
    return rows


def moved_together(sample: Sample) -> Sample:
    """Counted tokens to the left, zeros behind them."""

    def compact(row: Row) -> Row:
        kept = [value for value, keep in zip(row, sample.mask, strict=True) if keep]
        return kept + [0.0] * (len(row) - len(kept))

    return replace(
        sample,
        rewards=compact(sample.rewards),
        mask=compact(sample.mask),
        logprobs=compact(sample.logprobs),
        squares=compact(sample.squares),
        weights=compact(sample.weights),
    )


def plain_distillation(batch: list[Sample]) -> list[Row]:
    found = []
    for sample in batch:
        task = 0.25 * centred(sample, batch)
        tokens = zip(sample.weights, sample.logprobs, sample.mask, strict=True)
        found.append([(teacher - student + task) * keep for teacher, student, keep in tokens])
    return found


def differences(batch: list[Sample]) -> list[Row]:
    """Sums of discounted temporal differences, carried over tokens that do not count."""
    found = []
    for sample in batch:
        row, following, carried = [0.0] * len(sample.mask), 0.0, 0.0
        for t in reversed(range(len(row))):
            fresh = sample.rewards[t] + GAMMA * following - sample.squares[t] + GAMMA * LAM * carried
            following = sample.squares[t] if sample.mask[t] else following
            row[t] = carried = fresh if sample.mask[t] else carried
        found.append(row)
    return found


def plain_gae(batch: list[Sample]) -> list[Row]:
    return whitened(differences(batch), batch, masked=False)


PLAIN: dict[str, Callable[[list[Sample]], list[Row]]] = {
    "gae": plain_gae,
    "grpo": plain_grpo,
    "grpo_passk": plain_passk,
    "gdpo": plain_gdpo,
    "rloo": plain_rloo,
    "opo": plain_opo,
    "gpg": plain_gpg,
    "reinforce": plain_reinforce,
    "reinforce_plus_plus": plain_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": plain_baseline,
    "remax": plain_remax,
    "optimal_token_baseline": plain_token_baseline,
    "tir_optimal_token_baseline": plain_tir_baseline,
    "distillation": plain_distillation,
}

# The comparison.


def tensor(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def inputs(batch: list[Sample]) -> AdvantageInputs:
    return AdvantageInputs(
        token_rewards_BR=tensor([s.rewards for s in batch]),
        mask_BR=tensor([s.mask for s in batch]),
        group_B=torch.tensor([s.group for s in batch]),
        reward_parts_BK=tensor([s.parts for s in batch]),
        baseline_B=tensor([s.parts for s in batch])[:, 0],
        logprobs_BR=tensor([s.logprobs for s in batch]),
        square_sums_BR=tensor([s.squares for s in batch]),
        importance_weights_BR=tensor([s.weights for s in batch]),
        reference_logprobs_BR=tensor([s.weights for s in batch]),
        values_BR=tensor([s.squares for s in batch]),
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    """Groups of two to four samples, masked in places, with coarse rewards so that ties and zeros happen."""
    width = draw(st.integers(2, 5))
    coarse = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])
    batch = []
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(2, 4))):
            mask = [1.0, *draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=width - 1, max_size=width - 1))]
            rows = [draw(st.lists(st.floats(0.1, 0.9), min_size=width, max_size=width)) for _ in range(3)]
            rewards = draw(st.lists(coarse, min_size=width, max_size=width))
            logprobs = [math.log(value) for value in rows[0]]
            parts = [draw(coarse), draw(coarse)]
            batch.append(Sample(7 - group, rewards, mask, logprobs, rows[1], rows[2], parts))
    return draw(st.permutations(batch))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_every_estimator_has_its_transcription() -> None:
    assert PLAIN.keys() == ESTIMATORS.keys()


@pytest.mark.parametrize("name", PLAIN)
@settings(deadline=None, max_examples=60)
@given(batch=batches())
def test_an_estimator_is_its_formula(name: str, batch: list[Sample]) -> None:
    close(ESTIMATORS[name](inputs(batch), OPTIONS).advantages_BR, tensor(PLAIN[name](batch)))


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(deadline=None, max_examples=30)
@given(batch=batches())
def test_padding_changes_nothing_and_has_no_advantage(name: str, batch: list[Sample]) -> None:
    def wider(row: Row) -> Row:
        return [*row, 0.0, 0.0]

    padded = [
        replace(
            s,
            rewards=wider(s.rewards),
            mask=wider(s.mask),
            logprobs=wider(s.logprobs),
            squares=wider(s.squares),
            weights=wider(s.weights),
        )
        for s in batch
    ]
    before, after = (ESTIMATORS[name](inputs(one), OPTIONS) for one in (batch, padded))
    close(after.advantages_BR[:, :-2], before.advantages_BR)
    close(after.returns_BR[:, :-2], before.returns_BR)
    assert name == "gae" or not after.advantages_BR[:, -2:].any()


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"remax", "gae"}))  # these two leave them unmasked
@settings(deadline=None, max_examples=30)
@given(batch=batches())
def test_tokens_that_do_not_count_have_no_advantage(name: str, batch: list[Sample]) -> None:
    given_inputs = inputs(batch)
    assert not ESTIMATORS[name](given_inputs, OPTIONS).advantages_BR[given_inputs.mask_BR == 0].any()


@settings(deadline=None, max_examples=60)
@given(batch=batches())
def test_the_returns_of_gae_are_what_its_critic_learns(batch: list[Sample]) -> None:
    expected = [
        [x + value for x, value in zip(row, s.squares, strict=True)]
        for s, row in zip(batch, differences(batch), strict=True)
    ]
    close(gae(inputs(batch), OPTIONS).returns_BR, tensor(expected))
