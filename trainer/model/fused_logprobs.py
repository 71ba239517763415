"""Logprobs and entropies of target tokens block by block: no tensor of [tokens, vocabulary] is made or kept.

Forward goes in blocks of tokens and keeps two numbers of each, its logsumexp and its entropy H. With them
log p = logits / T - logsumexp is known of every entry by itself, so backward computes each logit once more and goes in
blocks of the vocabulary, where g and h are the gradients of logprob and entropy:

    grad logits = (g (1[target] - p) - h p (log p + H)) / T

A block's rows of the head's gradient are then one matmul over all tokens, rounded once; only the gradient of the hidden
states is a sum over blocks, kept in float32. (Blocks of tokens would need a float32 sum as large as the head: 1.6 GB at
152k x 2560; a sum in bfloat16 is rounded again at every block.)

Matmuls run in the weights' dtype, so the logits of a bfloat16 head are rounded to bfloat16, as the plain model and
inference engines do (vLLM and SGLang unless they are told to run the head in float32); all after them is float32, or
float64 for a float64 model.

Dimensions: N tokens, D hidden size, V vocabulary, C a block of the vocabulary.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

EntropyMode: TypeAlias = Literal["none", "detached", "gradient"]
_TILE = 128
"""Blocks are multiples of it where they can be: a smaller rest costs a matmul as much."""
_LOWEST = -1e30
"""Of logits that come from outside; its probability is zero at any temperature."""


class Scoring(NamedTuple):
    """What is asked for, and how."""

    temperature: float
    max_logits_mib: int
    entropy: EntropyMode
    square_sums: bool
    compiled: bool

    def block(self, across: int, dtype: torch.dtype) -> int:
        """How many rows of `across` logits make a block, at least one."""
        rows = self.max_logits_mib * 2**20 // (max(across, 1) * wide(dtype).itemsize)
        return max(rows - rows % _TILE if rows > _TILE else rows, 1)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def block_scores(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, entropy: bool, square_sums: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Logsumexp, logprob, entropy and sum of squared probabilities; float32 logits are overwritten."""
    logprobs_NV = logits_NV.to(wide(logits_NV.dtype))
    if temperature != 1.0:
        logprobs_NV.div_(temperature)
    logsumexp_N = logprobs_NV.logsumexp(-1)
    logprobs_NV.sub_(logsumexp_N[:, None])
    logprobs_N = logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    entropy_N = squares_N = None
    if entropy or square_sums:
        probabilities_NV = logprobs_NV.exp()
        if square_sums:
            squares_N = torch.linalg.vector_norm(probabilities_NV, dim=-1).square()
        if entropy:
            entropy_N = -logprobs_NV.mul_(probabilities_NV).sum(-1)
    return logsumexp_N, logprobs_N, entropy_N, squares_N


def block_gradient(
    logits_NC: Tensor,
    targets_N: Tensor,
    logsumexp_N: Tensor,
    entropy_N: Tensor | None,
    grad_logprobs_N: Tensor,
    grad_entropy_N: Tensor | None,
    temperature: float,
) -> Tensor:
    """The gradient of the logits, in their dtype; float32 logits are overwritten.

    `targets_N` counts from the block's first column; targets outside of the block are other blocks' concern.
    """
    logprobs_NC = logits_NC.to(wide(logits_NC.dtype))
    if temperature != 1.0:
        logprobs_NC.div_(temperature)
    logprobs_NC.sub_(logsumexp_N[:, None])
    inside_N = (targets_N >= 0) & (targets_N < logits_NC.shape[1])
    scale_N = grad_logprobs_N / -temperature
    at_target_N = -scale_N * inside_N
    if entropy_N is None or grad_entropy_N is None:
        grad_NC = logprobs_NC.exp_().mul_(scale_N[:, None])
    else:
        grad_NC = logprobs_NC.exp()
        entropy_scale_N = grad_entropy_N / -temperature
        logprobs_NC.add_(entropy_N[:, None]).mul_(entropy_scale_N[:, None]).add_(scale_N[:, None])
        grad_NC.mul_(logprobs_NC)
    grad_NC.scatter_add_(1, (targets_N * inside_N)[:, None], at_target_N[:, None])
    return grad_NC.to(logits_NC.dtype)


class HeadScores(torch.autograd.Function):
    """(hidden states, the head's weight) -> logprobs, entropy, square sums."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        def logits(rows: slice) -> Tensor:
            return hidden_ND[rows] @ weight_VD.t()

        with torch.autocast(hidden_ND.device.type, enabled=False):
            block = scoring.block(len(weight_VD), weight_VD.dtype)
            logsumexp_N, scores = _forward(ctx, logits, targets_N, scoring, block)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, logsumexp_N, _kept_entropy(scores, scoring))
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor | None, _: Tensor | None) -> Any:
        hidden_ND, weight_VD, targets_N, logsumexp_N, entropy_N = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        gradient = _body(block_gradient, ctx.scoring.compiled)
        grad_ND = torch.zeros_like(hidden_ND, dtype=wide(hidden_ND.dtype)) if for_hidden else None
        grad_VD = torch.empty_like(weight_VD) if for_weight else None
        columns = ctx.scoring.block(len(hidden_ND), hidden_ND.dtype)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for first in range(0, len(weight_VD), columns):
                part_CD = weight_VD[first : first + columns]
                per_token = (targets_N - first, logsumexp_N, entropy_N, grad_logprobs_N, grad_entropy_N)
                grad_NC = gradient(hidden_ND @ part_CD.t(), *per_token, ctx.scoring.temperature)
                if grad_ND is not None:
                    grad_ND += grad_NC @ part_CD
                if grad_VD is not None:
                    torch.mm(grad_NC.t(), hidden_ND, out=grad_VD[first : first + columns])
        return None if grad_ND is None else grad_ND.to(hidden_ND.dtype), grad_VD, None, None


class LogitScores(torch.autograd.Function):
    """Logits -> logprobs, entropy, square sums; the logits are kept in their own dtype only."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        def logits(rows: slice) -> Tensor:
            return _finite_copy(logits_NV[rows])

        block = scoring.block(logits_NV.shape[1], logits_NV.dtype)
        logsumexp_N, scores = _forward(ctx, logits, targets_N, scoring, block)
        ctx.save_for_backward(logits_NV, targets_N, logsumexp_N, _kept_entropy(scores, scoring))
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor | None, _: Tensor | None) -> Any:
        logits_NV, targets_N, logsumexp_N, entropy_N = ctx.saved_tensors
        gradient = _body(block_gradient, ctx.scoring.compiled)
        grad_NV = torch.empty_like(logits_NV)
        rows = ctx.scoring.block(logits_NV.shape[1], logits_NV.dtype)
        per_token = (targets_N, logsumexp_N, entropy_N, grad_logprobs_N, grad_entropy_N)
        for first in range(0, len(logits_NV), rows):
            here = slice(first, first + rows)
            parts = (None if values_N is None else values_N[here] for values_N in per_token)
            grad_NV[here] = gradient(_finite_copy(logits_NV[here]), *parts, ctx.scoring.temperature)
        return grad_NV, None, None


def _finite_copy(logits_NV: Tensor) -> Tensor:
    """In float32. A token that a model masks with -inf has no part in the entropy: 0 log 0 is 0."""
    return logits_NV.to(wide(logits_NV.dtype), copy=True).clamp_(min=_LOWEST)


def _forward(
    ctx: Any, logits: Callable[[slice], Tensor], targets_N: Tensor, scoring: Scoring, block: int
) -> tuple[Tensor, tuple[Tensor, Tensor | None, Tensor | None]]:
    """Logsumexp and scores of all tokens; an empty batch is one empty block."""
    score = _body(block_scores, scoring.compiled)
    wanted = (scoring.temperature, scoring.entropy != "none", scoring.square_sums)
    starts = range(0, max(len(targets_N), 1), block)
    here = [slice(first, first + block) for first in starts]
    parts = zip(*(score(logits(rows), targets_N[rows], *wanted) for rows in here), strict=True)
    logsumexp_N, logprobs_N, entropy_N, squares_N = (None if part[0] is None else torch.cat(part) for part in parts)
    ctx.scoring = scoring
    constant = [squares_N, None if scoring.entropy == "gradient" else entropy_N]
    ctx.mark_non_differentiable(*(values_N for values_N in constant if values_N is not None))
    assert logsumexp_N is not None and logprobs_N is not None
    return logsumexp_N, (logprobs_N, entropy_N, squares_N)


def _kept_entropy(scores: tuple[Tensor, Tensor | None, Tensor | None], scoring: Scoring) -> Tensor | None:
    return scores[1] if scoring.entropy == "gradient" else None


@cache
def _body(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """The function as it is, or with all that it does between two matmuls in few kernels."""
    return torch.compile(function) if compiled else function
