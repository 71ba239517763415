"""Advantage estimators by name: one pure function per file, rewards and mask in, advantages and returns out."""

from functools import cache

from trainer.advantages.distillation import distillation
from trainer.advantages.gae import gae
from trainer.advantages.gdpo import gdpo
from trainer.advantages.gpg import gpg
from trainer.advantages.grpo import grpo
from trainer.advantages.grpo_passk import grpo_passk
from trainer.advantages.opo import opo
from trainer.advantages.optimal_token_baseline import optimal_token_baseline
from trainer.advantages.reinforce import reinforce
from trainer.advantages.reinforce_plus_plus import reinforce_plus_plus
from trainer.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from trainer.advantages.remax import remax
from trainer.advantages.rloo import rloo
from trainer.advantages.tir_optimal_token_baseline import tir_optimal_token_baseline
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs, Estimator
from trainer.config import ESTIMATOR
from trainer.configs.plugins import load

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gae": gae,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
    "distillation": distillation,
}
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""These need logprobs and sums of squared probabilities of the weights that the step begins with."""

READS_LOGPROBS = (*TOKEN_BASELINES, "distillation")
"""These need logprobs of the weights that the step begins with."""


@cache
def estimator_of(name: str) -> Estimator:
    """The estimator of that name, or a user's own; PluginError where it is not there or takes other arguments."""
    return load(name, ESTIMATOR, ESTIMATORS, returns=AdvantageOutputs)


def has_token_baseline(name: str, estimator: Estimator) -> bool:
    """Whether the estimator reads `logprobs_BR` and `square_sums_BR`; a user's says so by an attribute."""
    return name in TOKEN_BASELINES or bool(getattr(estimator, "token_baseline", False))


def reads_logprobs(name: str, estimator: Estimator) -> bool:
    """Whether the estimator reads `logprobs_BR`; a user's says so by an attribute."""
    said = any(getattr(estimator, trait, False) for trait in ("reads_logprobs", "token_baseline"))
    return name in READS_LOGPROBS or said


__all__ = [
    "ESTIMATORS",
    "TOKEN_BASELINES",
    "AdvantageInputs",
    "AdvantageOptions",
    "AdvantageOutputs",
    "Estimator",
    "estimator_of",
    "gae",
    "has_token_baseline",
    "reads_logprobs",
]
