"""How a token is drawn: parameters, stop reasons, version spans, uniform numbers and the draw itself.

A draw needs no generator state: the uniform number of a token is a hash of (seed of the sample, index of the token),
so a sample gets the same tokens whatever else is in its batch and whenever it was admitted.

Shapes: B samples, V vocabulary.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class StopReason(StrEnum):
    """Why a sample ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """`num_tokens` consecutive tokens that were sampled under the weights of `policy_version`."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sample is drawn.

    temperature: divides the logits; 0 takes the most likely token.
    top_p: smallest set of most likely tokens with at least this mass is kept (1 keeps all).
    top_k: number of most likely tokens kept (-1 or 0 keeps all).
    max_tokens: longest response in tokens, the end-of-sequence token included.
    stop: strings that end the response; the token that completes one is the last token.
    ignore_eos: the end-of-sequence token does not end the sample.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number >= 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 or 0 (all) or a positive number, not {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not all(self.stop):
            raise ValueError("an empty stop string would end every sample at once")

    @property
    def filters(self) -> bool:
        """Whether tokens are cut away before the draw (never at temperature 0)."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


def uniforms(seed_B: Tensor, *, index_B: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float32 with 24 random bits, shape (B).

    Number i of a seed is output i of the splitmix64 stream of this seed (Steele, Lea, Flood 2014). Both inputs are
    int64; a seed above 2**63 - 1 is given as its two's complement.
    """
    state_B = seed_B + (index_B + 1) * _signed(0x9E3779B97F4A7C15)
    state_B = (state_B ^ _shifted(state_B, by=30)) * _signed(0xBF58476D1CE4E5B9)
    state_B = (state_B ^ _shifted(state_B, by=27)) * _signed(0x94D049BB133111EB)
    state_B = state_B ^ _shifted(state_B, by=31)
    return _shifted(state_B, by=40).to(torch.float32) * 2.0**-24


def sample(
    logits_BV: Tensor,
    *,
    uniform_B: Tensor,
    temperature: float | Tensor,
    top_k_B: Tensor | None = None,
    top_p_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by the inverse of the cumulative distribution.

    The distribution is softmax(logits / temperature), cut to top_k and then to top_p, and renormalised. Rows of
    temperature 0 take the most likely token and the log-probability of the plain softmax. One float as temperature,
    and no filters, is the fast path. Filters come together: give both or none.

    Returns token ids (B, int64) and their log-probabilities under the distribution that was sampled (B, float32).
    """
    logits_BV = logits_BV.float()
    if isinstance(temperature, float):
        if temperature == 0:
            return _most_likely(logits_BV)
        scaled_BV = logits_BV if temperature == 1 else logits_BV / temperature
        return _draw(scaled_BV, uniform_B=uniform_B, top_k_B=top_k_B, top_p_B=top_p_B)
    greedy_B = temperature == 0
    scaled_BV = logits_BV / torch.where(greedy_B, 1.0, temperature)[:, None]
    drawn_B, drawn_logprob_B = _draw(scaled_BV, uniform_B=uniform_B, top_k_B=top_k_B, top_p_B=top_p_B)
    best_B, best_logprob_B = _most_likely(logits_BV)
    return torch.where(greedy_B, best_B, drawn_B), torch.where(greedy_B, best_logprob_B, drawn_logprob_B)


def _most_likely(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    token_B = logits_BV.argmax(-1)
    return token_B, logits_BV.log_softmax(-1).gather(1, token_B[:, None])[:, 0]


def _draw(
    scaled_BV: Tensor, *, uniform_B: Tensor, top_k_B: Tensor | None, top_p_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    if top_k_B is not None and top_p_B is not None:
        scaled_BV = scaled_BV.masked_fill(~_kept(scaled_BV, top_k_B=top_k_B, top_p_B=top_p_B), -math.inf)
    probs_BV = scaled_BV.softmax(-1)
    cumulative_BV = probs_BV.cumsum(-1)
    total_B = cumulative_BV[:, -1]
    # Below the total even where the product rounds up: then the first entry above it has a probability above 0.
    threshold_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    token_B1 = torch.searchsorted(cumulative_BV, threshold_B[:, None], right=True).clamp_(max=probs_BV.shape[1] - 1)
    chosen_B1 = probs_BV.gather(1, token_B1)
    if top_k_B is not None:
        # Parallel prefix sums on a GPU may fall by one rounding step and so hit a token that was cut away.
        best_B1 = probs_BV.argmax(-1, keepdim=True)
        token_B1 = torch.where(chosen_B1 > 0, token_B1, best_B1)
        chosen_B1 = probs_BV.gather(1, token_B1)
    return token_B1[:, 0], chosen_B1[:, 0].clamp_min(torch.finfo(torch.float32).tiny).log()


def _kept(scaled_BV: Tensor, *, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Which tokens survive top_k and then top_p, (B, V) bool; among equal logits the lower token id wins."""
    sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(scaled_BV.shape[1], device=scaled_BV.device)
    within_k_BV = (rank_V < top_k_B[:, None]) | (top_k_B[:, None] <= 0)
    probs_BV = sorted_BV.masked_fill(~within_k_BV, -math.inf).softmax(-1)
    mass_before_BV = probs_BV.cumsum(-1) - probs_BV
    keep_BV = within_k_BV & ((mass_before_BV < top_p_B[:, None]) | (top_p_B[:, None] >= 1))
    keep_BV[:, 0] = True
    return torch.zeros_like(keep_BV).scatter_(1, order_BV, keep_BV)


def _shifted(value: Tensor, *, by: int) -> Tensor:
    # Torch shifts signed numbers arithmetically: the mask takes the copied sign bits away again.
    return (value >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
