"""Soft overlong punishment (DAPO, arXiv 2503.14476): a response that nears the token limit loses reward. B samples."""

from torch import Tensor

from trainer.metrics import StepMetrics


def overlong_penalty(lengths_B: Tensor, *, limit: int, buffer: int, factor: float) -> Tensor:
    """min(-(length - (limit - buffer)) / buffer * factor, 0) of response lengths in tokens; added to the reward, [B].

    0 up to limit - buffer, then linear, -factor at the limit.
    """
    return (-(lengths_B.double() - (limit - buffer)) / buffer * factor).clamp(max=0.0)


def overlong_metrics(penalty_B: Tensor) -> StepMetrics:
    """Mean of the penalty over the samples, and the share of those that have one."""
    return {"overlong_penalty_mean": float(penalty_B.mean()), "overlong_share": float((penalty_B < 0).double().mean())}
