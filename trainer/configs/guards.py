"""Settings of the guards: when a step is out of bounds, and when the run stops. Imports pydantic only."""

from pydantic import Field

from trainer.configs.section import Section

THRESHOLDS = {
    "grad_norm_above": "grad_norm",
    "kl_above": "kl",
    "entropy_below": "entropy",
    "logprob_diff_above": "logprob_diff_mean",
}
"""Alarm -> the metric that it watches."""


class GuardsConfig(Section):
    """What may not go on unseen."""

    max_skips_in_a_row: int = Field(
        default=3,
        ge=0,
        description="updates with a loss or gradient that is not finite are left out; after so many in a row the run"
        " stops and names their samples. 0: it never does",
    )
    grad_norm_above: float | None = Field(
        default=None, gt=0, description="alarm: gradient 2-norm before clipping, mean over a step's updates; null: none"
    )
    kl_above: float | None = Field(
        default=None, gt=0, description="alarm: KL to the reference policy, in nats per token; null: none"
    )
    entropy_below: float | None = Field(
        default=None, gt=0, description="alarm: entropy of the next-token distribution, in nats; null: none"
    )
    logprob_diff_above: float | None = Field(
        default=None,
        gt=0,
        description="alarm: mean absolute difference of behaviour and trainer logprobs, in nats per token; null: none",
    )
    stop_on_alarm: bool = Field(default=False, description="an alarm stops the run instead of only being told")
