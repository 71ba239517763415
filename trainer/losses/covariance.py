"""How much each token pulls the entropy down: covariance of advantage and logprob (arXiv 2505.22617). B, R tokens.

Means and shares are over the counted tokens of the micro-batch, as in verl, not over the whole batch: which tokens are
chosen, and so the loss, depends on the split into micro-batches.
"""

import torch
from torch import Tensor

from trainer.losses.aggregate import EPSILON
from trainer.losses.types import LossInputs


@torch.no_grad()
def token_covariance(inputs: LossInputs) -> Tensor:
    """(A - mean A) * (logprobs - mean logprobs), constant [B, R]; only counted tokens have a meaning."""
    tokens = inputs.mask_BR.sum() + EPSILON
    advantages_BR, logprobs_BR = (
        values_BR - (values_BR * inputs.mask_BR).sum() / tokens
        for values_BR in (inputs.advantages_BR, inputs.logprobs_BR)
    )
    return advantages_BR * logprobs_BR


def num_chosen(inputs: LossInputs, *, share: float) -> int:
    """This share of the counted tokens, but at least one where there is any."""
    tokens = int(inputs.mask_BR.sum())
    return min(tokens, max(1, int(share * tokens)))
