"""The whole objective of one micro-batch: policy loss + KL to the reference - entropy bonus. B samples, R tokens."""

import torch

from trainer.corrections import log_ratio
from trainer.losses.aggregate import aggregate
from trainer.losses.kl import kl_penalty
from trainer.losses.types import LossInputs, LossOptions, LossOutputs, PolicyLoss
from trainer.metrics import Metric, token_mean


def objective(policy: PolicyLoss, inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """policy(inputs) + kl_loss_coef * agg(kl) - entropy_coef * agg(entropy), with the metrics of all parts.

    Raises ValueError when the KL is a loss and the micro-batch has no reference logprobs.
    """
    outputs = policy(inputs, options)
    loss, metrics = outputs.loss, {**outputs.metrics, **_importance_metrics(inputs)}
    for name, term in (_kl_term(inputs, options, metrics), _entropy_term(inputs, options, metrics)):
        if term is not None:
            loss = loss + term
            metrics[name] = Metric(term.detach(), "sum")
    metrics["loss"] = Metric(loss.detach(), "sum")
    return LossOutputs(loss=loss, metrics=metrics)


def _kl_term(inputs: LossInputs, options: LossOptions, metrics: dict[str, Metric]) -> tuple[str, torch.Tensor | None]:
    if inputs.reference_logprobs_BR is None:
        if options.kl_loss_coef:
            raise ValueError("the KL is a loss, but trajectories carry no reference logprobs")
        return "kl_loss", None
    with torch.set_grad_enabled(options.kl_loss_coef > 0):
        kl_BR = kl_penalty(inputs.logprobs_BR, inputs.reference_logprobs_BR, estimator=options.kl_estimator)
    metrics["kl"] = token_mean(kl_BR.detach(), inputs.mask_BR)
    if not options.kl_loss_coef:
        return "kl_loss", None
    return "kl_loss", options.kl_loss_coef * _aggregate(kl_BR, inputs, options)


def _entropy_term(
    inputs: LossInputs, options: LossOptions, metrics: dict[str, Metric]
) -> tuple[str, torch.Tensor | None]:
    if inputs.entropy_BR is None:
        return "entropy_loss", None
    metrics["entropy"] = token_mean(inputs.entropy_BR.detach(), inputs.mask_BR)
    if not options.entropy_coef:
        return "entropy_loss", None
    return "entropy_loss", -options.entropy_coef * _aggregate(inputs.entropy_BR, inputs, options)


def _aggregate(values_BR: torch.Tensor, inputs: LossInputs, options: LossOptions) -> torch.Tensor:
    return aggregate(
        values_BR,
        inputs.mask_BR,
        mode=options.aggregation,
        denominators=inputs.denominators,
        scale_factor=options.loss_scale_factor,
    )


@torch.no_grad()
def _importance_metrics(inputs: LossInputs) -> dict[str, Metric]:
    ratio_BR = log_ratio(inputs.old_logprobs_BR, inputs.behaviour_logprobs_BR).exp() * inputs.mask_BR
    return {
        "importance_ratio_mean": token_mean(ratio_BR, inputs.mask_BR),
        "importance_ratio_square": token_mean(ratio_BR.square(), inputs.mask_BR),
        "importance_ratio_max": Metric(ratio_BR.amax(), "max"),
    }
