"""From per-token losses to one number. Dimensions: B samples of the micro-batch, R response tokens."""

from torch import Tensor

from trainer.losses.types import Denominators

EPSILON = 1e-8


def aggregate(
    values_BR: Tensor, mask_BR: Tensor, *, mode: str, denominators: Denominators, scale_factor: float | None = None
) -> Tensor:
    """This micro-batch's share of the whole batch's loss, a scalar.

    token-mean: sum / tokens. token-sum: sum. seq-mean-token-sum: mean over non-empty samples of token sums;
    -norm: also divided by `scale_factor` (default: width of the whole batch). seq-mean-token-mean: mean over non-empty
    samples of sum / (length + 1e-8). Raises ValueError on another mode.
    """
    masked_BR = values_BR * mask_BR
    sequences = max(denominators.sequences, 1.0)
    match mode:
        case "token-mean":
            return masked_BR.sum() / max(denominators.tokens, 1.0)
        case "token-sum":
            return masked_BR.sum()
        case "seq-mean-token-sum":
            return masked_BR.sum() / sequences
        case "seq-mean-token-sum-norm":
            return masked_BR.sum() / sequences / (scale_factor or denominators.width)
        case "seq-mean-token-mean":
            return (masked_BR.sum(-1) / (mask_BR.sum(-1) + EPSILON)).sum() / sequences
    raise ValueError(f"unknown loss aggregation {mode!r}")
