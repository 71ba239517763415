"""Policy losses by name: one pure function per file, tensors of one micro-batch in, loss and metrics out."""

from trainer.losses.decoupled import decoupled
from trainer.losses.ppo import vanilla
from trainer.losses.types import Denominators, LossInputs, LossOptions, LossOutputs, PolicyLoss

LOSSES: dict[str, PolicyLoss] = {"vanilla": vanilla, "decoupled": decoupled}

__all__ = ["LOSSES", "Denominators", "LossInputs", "LossOptions", "LossOutputs", "PolicyLoss"]
