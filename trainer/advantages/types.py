"""What an advantage estimator takes and gives. B samples, R response tokens, K parts of the reward."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """One whole batch, on the CPU; every estimator works in the dtype of `token_rewards_BR`."""

    token_rewards_BR: Tensor
    """Reward of each token; an outcome reward stands on the last response token, less the KL when that is a reward."""
    mask_BR: Tensor
    """1 where a response token counts."""
    group_B: Tensor
    """int64; samples of one prompt share a number, numbers need not be contiguous."""
    reward_parts_BK: Tensor | None = None
    """Parts of the reward, in the order of the options' `part_weights` (gdpo)."""
    logprobs_BR: Tensor | None = None
    """Of the weights that the step begins with (optimal_token_baseline, distillation)."""
    square_sums_BR: Tensor | None = None
    """Sum of the squared probabilities of all next tokens, under the same weights (optimal_token_baseline)."""
    baseline_B: Tensor | None = None
    """Reward of the greedy sample of each sample's group (remax)."""
    importance_weights_BR: Tensor | None = None
    """What the loss multiplies a token with for its sampler's age; None: nothing (optimal_token_baseline)."""
    values_BR: Tensor | None = None
    """What the critic expects before each token, under the weights that the step begins with (gae)."""
    reference_logprobs_BR: Tensor | None = None
    """Of the reference service's model, where the trajectories have them: the teacher's (distillation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOptions:
    """Numbers that estimators read; each names those that it uses."""

    norm_by_std: bool = True
    """Divide by the group's standard deviation (grpo, grpo_passk, gdpo)."""
    gamma: float = 1.0
    """Discount per counted token (reinforce_plus_plus, gae)."""
    lam: float = 1.0
    """Weight of each further temporal difference (gae)."""
    part_weights: tuple[float, ...] = ()
    """Weight of each part of the reward (gdpo)."""
    reward_weight: float = 0.0
    """Weight of the task's reward beside the teacher's grades (distillation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOutputs:
    """Advantages and returns per token, and the estimator's own figures."""

    advantages_BR: Tensor
    returns_BR: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


Estimator: TypeAlias = Callable[[AdvantageInputs, AdvantageOptions], AdvantageOutputs]
