"""Direct reward optimization, DRO (arXiv 2405.19107). Dimensions: B samples, R response tokens."""

from trainer.losses.diagnostics import ratio_metrics
from trainer.losses.ppo import policy_loss
from trainer.losses.types import LossInputs, LossOptions, LossOutputs


def dro(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """-(A * logprobs - beta / 2 * (logprobs - old)^2): the policy gradient with a quadratic leash.

    The log ratio is not clamped. Samples without advantage are pulled to the old policy too. Leaves out the paper's
    learned value: the advantage stands for it. Uses dro_beta; raises ValueError where it is not above 0.
    """
    if options.dro_beta is None or options.dro_beta <= 0:
        raise ValueError(f"the loss dro needs dro_beta > 0, not {options.dro_beta}")
    leash_BR = 0.5 * options.dro_beta * (inputs.logprobs_BR - inputs.old_logprobs_BR).square()
    loss_BR = leash_BR - inputs.logprobs_BR * inputs.advantages_BR
    return policy_loss(loss_BR, inputs, options, ratio_metrics(inputs))
