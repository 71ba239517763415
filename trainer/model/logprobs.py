"""Logprobs and entropies of target tokens, without a float32 tensor of all logits.

Dimensions: N tokens, D hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.model.fused_logprobs import EntropyMode, HeadScores, LogitScores, Scoring


class TokenScores(NamedTuple):
    """float32 (float64 for a float64 model), nats. A tuple, so that FSDP2 finds the tensors that backward begins at."""

    logprobs_N: Tensor
    entropy_N: Tensor | None
    square_sums_N: Tensor | None
    """Sum of the squared probabilities of all tokens that could have stood there; never has a gradient."""
    best_N: Tensor | None = None
    """Whether no other token is more likely, bool; on request only, see `are_best`."""


def score_tokens(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    max_logits_mib: int = 256,
    entropy: EntropyMode = "none",
    square_sums: bool = False,
    compiled: bool = False,
) -> TokenScores:
    """Scores of `targets_N` where the logits are `hidden_ND @ weight_VD.T`, block by block, gradients exact.

    A block's float32 logits stay within `max_logits_mib`. At the peak about three times that is in use (two such
    blocks, logits and gradient in the head's dtype), and in backward a float32 gradient of the hidden states.
    `compiled` fuses what happens to a block between its matmuls (torch.compile).
    """
    dtype = _matmul_dtype(weight_VD)
    scoring = Scoring(temperature, max_logits_mib, entropy, square_sums, compiled)
    return TokenScores(*HeadScores.apply(hidden_ND.to(dtype), weight_VD.to(dtype), targets_N, scoring))  # type: ignore[no-untyped-call]


def score_logits(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    max_logits_mib: int = 256,
    entropy: EntropyMode = "none",
    square_sums: bool = False,
    compiled: bool = False,
) -> TokenScores:
    """The same of logits that stand already: they are kept, and get a gradient, in their own dtype."""
    scoring = Scoring(temperature, max_logits_mib, entropy, square_sums, compiled)
    return TokenScores(*LogitScores.apply(logits_NV, targets_N, scoring))  # type: ignore[no-untyped-call]


@torch.no_grad()
def are_best(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, max_logits_mib: int = 256) -> Tensor:
    """Whether greedy decoding would take each target, bool [N]; in blocks of tokens as `score_tokens` goes."""
    dtype = _matmul_dtype(weight_VD)
    hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
    rows = Scoring(1.0, max_logits_mib, "none", False, False).block(len(weight_VD), dtype)
    found = [(part_ND @ weight_VD.t()).argmax(-1) for part_ND in torch.split(hidden_ND, rows)]
    return torch.cat(found) == targets_N


def _matmul_dtype(weight_VD: Tensor) -> torch.dtype:
    device = weight_VD.device.type
    if torch.is_autocast_enabled(device) and weight_VD.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight_VD.dtype
