"""Advantage estimators by name: one pure function per file, rewards and mask in, advantages and returns out."""

from trainer.advantages.grpo import grpo
from trainer.advantages.reinforce import reinforce
from trainer.advantages.rloo import rloo
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs, Estimator

ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "rloo": rloo, "reinforce": reinforce}

__all__ = ["ESTIMATORS", "AdvantageInputs", "AdvantageOptions", "AdvantageOutputs", "Estimator"]
