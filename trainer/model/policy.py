"""A causal language model that scores chosen tokens of packed samples: what is sharded, trained and asked.

Dimensions: T tokens, N chosen positions among them, D hidden size, V vocabulary.
"""

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.attention.packed import sequence_arguments
from trainer.model.fused_logprobs import EntropyMode
from trainer.model.logprobs import TokenScores, are_best, score_logits, score_tokens
from trainer.packing import PackedTokens


class Policy(nn.Module):
    """Only chosen positions reach the output head, in blocks of at most `max_logits_mib` of float32 logits.

    A model that does more to its logits than its head does (soft-capping, scaling) is found by a probe and run whole,
    with the logits of all tokens.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float = 1.0, max_logits_mib: int = 256, compiled: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._max_logits_mib = max_logits_mib
        self._compiled = compiled
        self._attention: str = cast(PreTrainedModel, model).config._attn_implementation
        self._is_split = _is_split(model)

    def forward(
        self, tokens: PackedTokens, *, entropy: EntropyMode = "none", square_sums: bool = False, best: bool = False
    ) -> TokenScores:
        """Logprob of `targets_N` at `positions_N`, i.e. given the tokens of the sample up to and with them."""
        if not self._is_split:
            logits_NV = self.model(**self._arguments(tokens)).logits[0].index_select(0, tokens.positions_N)
            scores = score_logits(
                logits_NV, tokens.targets_N, temperature=self._temperature, entropy=entropy, square_sums=square_sums
            )
            return scores._replace(best_N=logits_NV.argmax(-1) == tokens.targets_N) if best else scores
        hidden_TD = cast(nn.Module, self.model.model)(**self._arguments(tokens)).last_hidden_state[0]
        hidden_ND, weight_VD = hidden_TD.index_select(0, tokens.positions_N), cast(nn.Linear, self.model.lm_head).weight
        scores = score_tokens(
            hidden_ND,
            weight_VD,
            tokens.targets_N,
            temperature=self._temperature,
            max_logits_mib=self._max_logits_mib,
            entropy=entropy,
            square_sums=square_sums,
            compiled=self._compiled,
        )
        if not best:
            return scores
        found_N = are_best(hidden_ND, weight_VD, tokens.targets_N, max_logits_mib=self._max_logits_mib)
        return scores._replace(best_N=found_N)

    def _arguments(self, tokens: PackedTokens) -> dict[str, Any]:
        """What keeps one sample from the next: positions for mask-building attention, lengths for packed attention."""
        told = sequence_arguments(tokens.cu_seqlens, tokens.max_length, attn_implementation=self._attention)
        return {"input_ids": tokens.input_ids_1T, "position_ids": tokens.position_ids_1T, **told}


@torch.no_grad()
def _is_split(model: nn.Module) -> bool:
    """Whether model(x) is lm_head(model.model(x)), and the head a plain product with its weight."""
    body, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    if not isinstance(body, nn.Module) or not isinstance(head, nn.Linear) or "bias" in head.state_dict():
        return False
    probe_BT = torch.arange(2, device=head.weight.device)[None]
    whole_BTV = model(input_ids=probe_BT, use_cache=False).logits
    parts_BTV = head(body(input_ids=probe_BT, use_cache=False).last_hidden_state)
    return parts_BTV.shape == whole_BTV.shape and torch.allclose(parts_BTV, whole_BTV, rtol=1e-3, atol=1e-5)
