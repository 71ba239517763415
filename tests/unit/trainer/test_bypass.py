"""Bypass mode by hand: which tokens count, and by which weight. B samples, R response tokens."""

import math
from dataclasses import replace

import pytest
import torch

from trainer.configs.correction import CorrectionConfig, RejectionConfig
from trainer.losses import LOSSES, Denominators, LossInputs, LossOptions
from trainer.metrics import Tally

RATIOS = [[0.5, 1.1, 4.0], [1.25, 1.25, 9.0]]
ADVANTAGES = [[1.0, 2.0, -1.0], [3.0, 3.0, 3.0]]
BEHAVIOUR = -1.5
INPUTS = LossInputs(
    logprobs_BR=(torch.tensor(RATIOS, dtype=torch.float64).log() + BEHAVIOUR).requires_grad_(),
    old_logprobs_BR=torch.full((2, 3), -7.0, dtype=torch.float64),  # never looked at
    behaviour_logprobs_BR=torch.full((2, 3), BEHAVIOUR, dtype=torch.float64),
    advantages_BR=torch.tensor(ADVANTAGES, dtype=torch.float64),
    mask_BR=torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.float64),
    denominators=Denominators(tokens=5, sequences=2, samples=2, width=3),
)
COUNTED = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def loss(correction: CorrectionConfig, kind: str = "reinforce", inputs: LossInputs = INPUTS) -> float:
    options = LossOptions(bypass_loss=kind, correction=correction)  # type: ignore[arg-type]
    return LOSSES["bypass"](inputs, options).loss.item()


def reinforce(weights: dict[tuple[int, int], float]) -> float:
    return -sum(w * ADVANTAGES[i][t] * (math.log(RATIOS[i][t]) + BEHAVIOUR) for (i, t), w in weights.items()) / 5


def test_reinforce_without_correction_is_the_plain_policy_gradient() -> None:
    assert loss(CorrectionConfig()) == pytest.approx(reinforce(dict.fromkeys(COUNTED, 1.0)))


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (CorrectionConfig(weights="token", weight_max=2.0), [0.5, 1.1, 2.0, 1.25, 1.25]),
        (CorrectionConfig(weights="token", bound="mask", weight_min=0.8, weight_max=2.0), [0, 1.1, 0, 1.25, 1.25]),
        (CorrectionConfig(weights="sequence", weight_max=None), [2.2] * 3 + [1.5625] * 2),
        (CorrectionConfig(weights="geometric", weight_max=None), [2.2 ** (1 / 3)] * 3 + [1.25] * 2),
        (
            CorrectionConfig(weights="token", weight_max=2.0, normalize=True),
            [w / 1.22 for w in (0.5, 1.1, 2, 1.25, 1.25)],
        ),
    ],
)
def test_reinforce_weighs_by_the_ratio_of_the_weights_in_training(
    correction: CorrectionConfig, expected: list[float]
) -> None:
    assert loss(correction) == pytest.approx(reinforce(dict(zip(COUNTED, expected, strict=True))), abs=1e-7)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (RejectionConfig(statistic="token_k1", high=3.0), COUNTED[:2] + COUNTED[3:]),  # 4 is above 3
        (RejectionConfig(statistic="seq_sum_k1", high=2.0, low=0.5), COUNTED[3:]),  # 1 / 2.2 is below 0.5
        (RejectionConfig(statistic="token_k3", high=0.05), [(0, 1), (1, 0), (1, 1)]),
    ],
)
def test_rejected_tokens_leave_the_sum_but_not_the_denominators(
    rule: RejectionConfig, kept: list[tuple[int, int]]
) -> None:
    correction = CorrectionConfig(reject=(rule,))
    assert loss(correction) == pytest.approx(reinforce(dict.fromkeys(kept, 1.0)))
    mask_BR = torch.zeros_like(INPUTS.mask_BR)
    for place in kept:
        mask_BR[place] = 1
    clipped = LOSSES["vanilla"](
        replace(INPUTS, old_logprobs_BR=INPUTS.behaviour_logprobs_BR, mask_BR=mask_BR), LossOptions()
    )
    assert loss(correction, "ppo_clip") == pytest.approx(clipped.loss.item())
    tally = Tally()
    tally.add(LOSSES["bypass"](INPUTS, LossOptions(correction=correction)).metrics, tokens=5)
    assert tally.result(updates=1)["rejected_token_share"] == pytest.approx(1 - len(kept) / 5)


def test_the_weight_is_constant_in_the_gradient_and_micro_batches_add_up() -> None:
    options = LossOptions(bypass_loss="reinforce", correction=CorrectionConfig(weights="token", weight_max=2.0))
    whole = LOSSES["bypass"](INPUTS, options).loss
    (slope_BR,) = torch.autograd.grad(whole, INPUTS.logprobs_BR)
    assert slope_BR[0].tolist() == pytest.approx([-0.5 / 5, -2.2 / 5, 2 / 5])
    parts = []
    for part in (slice(0, 1), slice(1, 2)):
        rows = {name: getattr(INPUTS, name)[part] for name in ROWS}
        parts.append(LOSSES["bypass"](replace(INPUTS, **rows), options).loss)
    torch.testing.assert_close(parts[0] + parts[1], whole)


ROWS = ("logprobs_BR", "old_logprobs_BR", "behaviour_logprobs_BR", "advantages_BR", "mask_BR")
