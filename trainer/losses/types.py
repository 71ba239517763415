"""What a policy loss takes and gives. Dimensions: B samples of the micro-batch, R response tokens.

A loss divides by the `Denominators` of the whole batch, so losses of micro-batches add up to the loss of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Generator, Tensor

from trainer.configs.correction import CorrectionConfig
from trainer.metrics import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts over the whole batch that one optimizer update sees, across micro-batches and ranks."""

    tokens: float
    """Response tokens that count."""
    sequences: float
    """Samples with at least one such token."""
    samples: float
    """All samples."""
    width: float
    """R of the whole batch."""

    @classmethod
    def of(cls, mask_BR: Tensor) -> "Denominators":
        """Of an update on the samples with this mask."""
        return cls(
            tokens=float(mask_BR.sum()),
            sequences=float(mask_BR.any(-1).sum()),
            samples=float(len(mask_BR)),
            width=float(mask_BR.shape[1]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch. Everything but `logprobs_BR` and `entropy_BR` is constant; padding holds zeros."""

    logprobs_BR: Tensor
    """Under the weights being trained; carries the gradient."""
    old_logprobs_BR: Tensor
    """Proximal policy: the denominator of the PPO ratio."""
    behaviour_logprobs_BR: Tensor
    """Under the policy that sampled."""
    advantages_BR: Tensor
    mask_BR: Tensor
    denominators: Denominators
    reference_logprobs_BR: Tensor | None = None
    weights_BR: Tensor | None = None
    """Correction from the behaviour to the proximal policy, a factor of every per-token policy loss; None: 1."""
    generator: Generator | None = None
    """Of the draws that a loss makes, on the CPU; None: torch's global one."""
    entropy_BR: Tensor | None = None
    """Of the whole next-token distribution, nats; carries the gradient only when the entropy bonus is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Numbers that losses read; each names those that it uses."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 3.0
    aggregation: str = "token-mean"
    loss_scale_factor: float | None = None
    importance_cap: float | None = 2.0
    bypass_loss: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Of `bypass` only; others find their corrected mask and weights in the inputs."""
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    dro_beta: float | None = None
    clip_cov_share: float = 0.0002
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    kl_cov_share: float = 0.0002
    kl_cov_coef: float = 1.0
    kl_loss_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """A scalar to call backward on, and detached metrics."""

    loss: Tensor
    metrics: dict[str, Metric]


PolicyLoss: TypeAlias = Callable[[LossInputs, LossOptions], LossOutputs]
