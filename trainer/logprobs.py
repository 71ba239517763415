"""Logprobs and entropies of chosen tokens, without a logits tensor over all positions.

Dimensions: B samples, T tokens, N chosen positions of the flattened [B, T], D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

EntropyMode: TypeAlias = Literal["none", "detached", "gradient"]
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """float32 (float64 for a float64 model), nats."""

    logprobs_N: Tensor
    entropy_N: Tensor | None
    square_sums_N: Tensor | None
    """Sum of the squared probabilities of all tokens that could have stood there."""


class TokenScorer:
    """Runs a causal language model and scores one target token at each chosen position.

    Only chosen positions reach the output head, in blocks whose float32 [tokens, V] tensor stays under
    `max_logits_mib`; with several blocks each is computed again in backward instead of being kept. A model that does
    more to its logits than its head does (soft-capping, scaling) is found by a probe and run whole, with all logits.
    """

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, max_logits_mib: int = 256) -> None:
        self._model = model
        self._temperature = temperature
        self._max_logits_bytes = max_logits_mib * 2**20
        self._body, self._head = _split(model)

    def __call__(
        self,
        input_ids_BT: Tensor,
        positions_N: Tensor,
        targets_N: Tensor,
        *,
        entropy: EntropyMode = "none",
        square_sums: bool = False,
    ) -> TokenScores:
        """Logprob of `targets_N` at the flat positions `positions_N`, i.e. given the tokens up to and with them."""
        more = _Wanted(entropy=entropy, square_sums=square_sums)
        if self._body is None or self._head is None:
            logits_BTV = self._model(input_ids=input_ids_BT, use_cache=False).logits
            return self._score(logits_BTV.flatten(0, 1).index_select(0, positions_N), targets_N, more)
        hidden_BTD = self._body(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, positions_N)
        return self._score_blocks(self._head, hidden_ND, targets_N, more)

    def _score_blocks(self, head: nn.Module, hidden_ND: Tensor, targets_N: Tensor, more: "_Wanted") -> TokenScores:
        vocabulary = cast(Tensor, head.weight).shape[0]
        rows = max(1, self._max_logits_bytes // (_FLOAT_BYTES * vocabulary))
        if len(hidden_ND) <= rows:
            return self._score(head(hidden_ND), targets_N, more)
        parts = []
        for hidden, targets in zip(torch.split(hidden_ND, rows), torch.split(targets_N, rows), strict=True):
            if torch.is_grad_enabled():
                parts.append(checkpoint(self._head_and_score, head, hidden, targets, more, use_reentrant=False))
            else:
                parts.append(self._head_and_score(head, hidden, targets, more))
        return _join(parts)

    def _head_and_score(self, head: nn.Module, hidden_ND: Tensor, targets_N: Tensor, more: "_Wanted") -> TokenScores:
        return self._score(head(hidden_ND), targets_N, more)

    def _score(self, logits_NV: Tensor, targets_N: Tensor, more: "_Wanted") -> TokenScores:
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        if self._temperature != 1.0:
            logits_NV = logits_NV / self._temperature
        logprobs_NV = logits_NV.log_softmax(-1)
        logprobs_N = logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1)
        entropy_N = squares_N = None
        if more.entropy != "none":
            with torch.set_grad_enabled(more.entropy == "gradient" and torch.is_grad_enabled()):
                entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        if more.square_sums:
            squares_N = (2 * logprobs_NV.detach()).exp().sum(-1)
        return TokenScores(logprobs_N=logprobs_N, entropy_N=entropy_N, square_sums_N=squares_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What is asked for beside the logprobs."""

    entropy: EntropyMode
    square_sums: bool


def _join(parts: list[TokenScores]) -> TokenScores:
    entropies = [part.entropy_N for part in parts if part.entropy_N is not None]
    squares = [part.square_sums_N for part in parts if part.square_sums_N is not None]
    return TokenScores(
        logprobs_N=torch.cat([part.logprobs_N for part in parts]),
        entropy_N=torch.cat(entropies) if entropies else None,
        square_sums_N=torch.cat(squares) if squares else None,
    )


@torch.no_grad()
def _split(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The body and the head of a causal language model, or None twice when head(body(x)) is not model(x)."""
    body, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    if not isinstance(body, nn.Module) or not isinstance(head, nn.Linear):
        return None, None
    probe_BT = torch.arange(2, device=head.weight.device)[None]
    whole_BTV = model(input_ids=probe_BT, use_cache=False).logits
    parts_BTV = head(body(input_ids=probe_BT, use_cache=False).last_hidden_state)
    if parts_BTV.shape == whole_BTV.shape and torch.allclose(parts_BTV, whole_BTV, rtol=1e-3, atol=1e-5):
        return body, head
    return None, None
