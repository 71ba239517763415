"""Soft adaptive policy optimization, SAPO (arXiv 2511.20347). Dimensions: B samples, R response tokens."""

from dataclasses import replace

import torch

from trainer.corrections import log_ratio
from trainer.losses.diagnostics import ratio_metrics
from trainer.losses.ppo import policy_loss
from trainer.losses.types import LossInputs, LossOptions, LossOutputs


def sapo(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """-A * sigmoid(tau (r - 1)) * 4 / tau; tau = tau_positive where A > 0, tau_negative elsewhere.

    A smooth gate in place of the clip: its slope is 1 on policy and fades on both sides. Always aggregates by
    seq-mean-token-mean, whatever the configured mode. Leaves out every hard clip. Uses tau_positive, tau_negative.
    """
    advantages_BR = inputs.advantages_BR
    ratio_BR = log_ratio(inputs.logprobs_BR, inputs.old_logprobs_BR).exp()
    positive = torch.as_tensor(options.tau_positive).to(advantages_BR)
    tau_BR = torch.where(advantages_BR > 0, positive, torch.as_tensor(options.tau_negative).to(advantages_BR))
    gate_BR = torch.sigmoid(tau_BR * (ratio_BR - 1)) * 4 / tau_BR
    by_sample = replace(options, aggregation="seq-mean-token-mean")
    return policy_loss(-advantages_BR * gate_BR, inputs, by_sample, ratio_metrics(inputs))
