"""M2PO's mask (arXiv 2510.01161): a bound on the second moment of the log ratios. B samples, R tokens, N counted."""

import torch
from torch import Tensor


@torch.no_grad()
def second_moment_mask(old_BR: Tensor, behaviour_BR: Tensor, mask_BR: Tensor, *, threshold: float) -> Tensor:
    """Which tokens stay, bool [B, R]: those of the largest (old - behaviour)^2 go until the mean of the rest fits.

    The fewest go for which the mean over the remaining counted tokens of the batch is below `threshold`; one always
    stays. Of equal values the first in the batch go first.
    """
    slots_N = mask_BR.flatten().nonzero().flatten()
    moment_N = (old_BR - behaviour_BR).double().square().flatten()[slots_N]
    kept_BR = mask_BR > 0
    if not len(moment_N):
        return kept_BR
    largest_N, order_N = moment_N.sort(descending=True, stable=True)
    rest_N = largest_N.flip(0).cumsum(0).flip(0) / torch.arange(len(largest_N), 0, -1)
    fits_N = (rest_N < threshold).nonzero()
    num_gone = int(fits_N[0]) if len(fits_N) else len(largest_N) - 1
    kept_BR.view(-1)[slots_N[order_N[:num_gone]]] = False
    return kept_BR
