"""Logprobs and entropies of chosen tokens, without a logits tensor over all positions.

Dimensions: B samples, T tokens, N chosen positions of the flattened [B, T], D hidden size, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.fused_logprobs import EntropyMode, HeadScores, LogitScores, Scoring


class TokenScores(NamedTuple):
    """float32 (float64 for a float64 model), nats. A tuple, so that FSDP2 finds the tensors that backward begins at."""

    logprobs_N: Tensor
    entropy_N: Tensor | None
    square_sums_N: Tensor | None
    """Sum of the squared probabilities of all tokens that could have stood there; never has a gradient."""


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

    A block's float32 logits stay within `max_logits_mib`; about two such live at once, and in backward a float32
    gradient of the hidden states. `compiled` fuses what happens to a block between its matmuls (torch.compile).
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


def _matmul_dtype(weight_VD: Tensor) -> torch.dtype:
    device = weight_VD.device.type
    if torch.is_autocast_enabled(device) and weight_VD.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight_VD.dtype


class TokenScorer:
    """Runs a causal language model and scores one target token at each chosen position.

    Only chosen positions reach the output head. A model that does more to its logits than its head does (soft-capping,
    scaling, a bias) is found by a probe and run whole, with all logits.
    """

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, max_logits_mib: int = 256) -> None:
        self._model = model
        self._options: dict[str, Any] = {"temperature": temperature, "max_logits_mib": max_logits_mib}
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
        inputs = {"input_ids": input_ids_BT, "use_cache": False}
        wanted: dict[str, Any] = {"entropy": entropy, "square_sums": square_sums, **self._options}
        if self._body is None or self._head is None:
            logits_NV = self._model(**inputs).logits.flatten(0, 1).index_select(0, positions_N)
            return score_logits(logits_NV, targets_N, **wanted)
        hidden_ND = self._body(**inputs).last_hidden_state.flatten(0, 1).index_select(0, positions_N)
        return score_tokens(hidden_ND, self._head.weight, targets_N, **wanted)


@torch.no_grad()
def _split(model: nn.Module) -> tuple[nn.Module | None, nn.Linear | None]:
    """The body and the head of a causal language model, or None twice when head(body(x)) is not model(x)."""
    body, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    if not isinstance(body, nn.Module) or type(head) is not nn.Linear:
        return None, None
    if "bias" in dict(head.named_parameters()):
        return None, None
    probe_BT = torch.arange(2, device=head.weight.device)[None]
    whole_BTV = model(input_ids=probe_BT, use_cache=False).logits
    parts_BTV = head(body(input_ids=probe_BT, use_cache=False).last_hidden_state)
    if parts_BTV.shape == whole_BTV.shape and torch.allclose(parts_BTV, whole_BTV, rtol=1e-3, atol=1e-5):
        return body, head
    return None, None
