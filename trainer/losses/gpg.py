"""Group policy gradient, GPG (arXiv 2504.02546): the plain policy gradient. B samples, R response tokens."""

from trainer.losses.diagnostics import ratio_metrics
from trainer.losses.ppo import policy_loss
from trainer.losses.types import LossInputs, LossOptions, LossOutputs


def gpg(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """-logprobs * A: REINFORCE, without ratio, clip or trust region.

    Right on policy only; several updates on a batch or stale samples go uncorrected. The paper's scale by groups that
    teach something is part of the advantage estimator `gpg`. Uses nothing but the aggregation.
    """
    return policy_loss(-inputs.logprobs_BR * inputs.advantages_BR, inputs, options, ratio_metrics(inputs))
