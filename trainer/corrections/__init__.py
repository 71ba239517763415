"""From the behaviour policy to the proximal one: importance weights, rejection, and what they say of a batch."""

from trainer.corrections.correct import Correction, correct
from trainer.corrections.ratio import LOG_RATIO_BOUND, effective_sample_share, log_ratio, truncated_weights
from trainer.corrections.rejection import kept_by, statistic
from trainer.corrections.second_moment import second_moment_mask
from trainer.corrections.weights import bounded, importance_weights, normalized

__all__ = [
    "LOG_RATIO_BOUND",
    "Correction",
    "bounded",
    "correct",
    "effective_sample_share",
    "importance_weights",
    "kept_by",
    "log_ratio",
    "normalized",
    "second_moment_mask",
    "statistic",
    "truncated_weights",
]
