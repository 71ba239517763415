"""What a user may write: an estimator, a loss, and a loss that breaks."""

from __future__ import annotations

from dataclasses import replace

from trainer.advantages import AdvantageInputs, AdvantageOptions, AdvantageOutputs
from trainer.losses import LOSSES, LossInputs, LossOptions, LossOutputs


def half_reward(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """Half the reward on every counted token."""
    advantages_BR = 0.5 * inputs.token_rewards_BR.sum(-1, keepdim=True) * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR, metrics={"users_own": 7.0})


def twice_vanilla(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """The loss of `vanilla`, doubled."""
    found = LOSSES["vanilla"](inputs, options)
    return replace(found, loss=2 * found.loss)


def not_a_number(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """A loss that no update can be made of."""
    found = LOSSES["vanilla"](inputs, options)
    return replace(found, loss=found.loss * float("nan"))


def takes_too_little(inputs: AdvantageInputs) -> AdvantageOutputs:
    """No estimator: it does not take the options."""
    return half_reward(inputs, AdvantageOptions())
