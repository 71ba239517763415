"""Scores of target tokens, forward and backward: from all logits at once, in blocks, and in compiled blocks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.bench.report import keep, spread, write

if TYPE_CHECKING:
    from torch import Tensor

    Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]

WAYS = ("plain", "eager", "compiled")
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsWork:
    """One call of the output head with everything after it, and its backward."""

    device: str
    tokens: int
    vocabulary: int
    hidden: int
    dtype: str
    max_logits_mib: int
    entropy: bool
    """With the entropy's gradient."""
    ways: tuple[str, ...]
    rounds: int


def bench_logprobs(work: LogprobsWork, *, out: Path | None) -> int:
    figures: dict[str, Any] = {"work": asdict(work)}
    for way in work.ways:
        figures[way] = _measured(work, way)
        keep(out, "logprobs", figures)
    return write(out, "logprobs", figures)


def _measured(work: LogprobsWork, way: str) -> dict[str, Any]:
    """Tokens a second and, on a GPU, memory; {"fits": False} where the card is too small for it."""
    import torch

    gc.collect()
    if work.device.startswith("cuda"):
        torch.cuda.empty_cache()
    try:
        return {"fits": True} | _Bed(work, way).figures()
    except torch.OutOfMemoryError:
        return {"fits": False}


class _Bed:
    """Inputs of one way, the same for all."""

    def __init__(self, work: LogprobsWork, way: str) -> None:
        import torch

        self._work = work
        self._device = torch.device(work.device)
        self._score = _ways(work)[way]
        draw = torch.Generator(self._device).manual_seed(0)
        like: dict[str, Any] = {"generator": draw, "device": self._device, "dtype": getattr(torch, work.dtype)}
        self._hidden_ND = torch.randn(work.tokens, work.hidden, **like).requires_grad_()
        weight_VD = torch.randn(work.vocabulary, work.hidden, **like).mul_(2 / work.hidden**0.5)
        self._weight_VD = weight_VD.requires_grad_()
        self._targets_N = torch.randint(work.vocabulary, (work.tokens,), generator=draw, device=self._device)

    def figures(self) -> dict[str, Any]:
        first_seconds, _, logprob_mean = self._round()
        rounds = [self._round() for _ in range(self._work.rounds)]
        seconds = [seconds for seconds, _, _ in rounds]
        peaks = [peak for _, peak, _ in rounds if peak is not None]
        inputs = 2 * (self._hidden_ND.nbytes + self._weight_VD.nbytes) + self._targets_N.nbytes
        matmuls = 6.0 * self._work.tokens * self._work.vocabulary * self._work.hidden
        return {
            "seconds": spread(seconds),
            "tokens_per_s": spread([self._work.tokens / one for one in seconds], digits=0),
            "useful_tflop_per_s": spread([matmuls / one / 1e12 for one in seconds], digits=2),
            "first_seconds": round(first_seconds, 3),
            "peak_mib": round(max(peaks) / MIB) if peaks else None,
            "peak_above_inputs_and_gradients_mib": round((max(peaks) - inputs) / MIB) if peaks else None,
            "logprob_mean": logprob_mean,
        }

    def _round(self) -> tuple[float, int | None, float]:
        """Seconds, peak bytes of the tensors on a GPU, mean logprob."""
        import torch

        on_gpu = self._device.type == "cuda"
        self._hidden_ND.grad = self._weight_VD.grad = None
        if on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        began = time.perf_counter()
        logprobs_N, entropy_N = self._score(self._hidden_ND, self._weight_VD, self._targets_N)
        loss = -logprobs_N.mean() if entropy_N is None else -logprobs_N.mean() - 0.01 * entropy_N.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if on_gpu:
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else None
        return seconds, peak, round(float(logprobs_N.detach().mean()), 5)


def _ways(work: LogprobsWork) -> dict[str, Score]:
    from trainer.model.logprobs import score_tokens

    def plain(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor | None]:
        logprobs_NV = (hidden_ND @ weight_VD.t()).float().log_softmax(-1)
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1) if work.entropy else None
        return logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N

    def in_blocks(*, compiled: bool) -> Score:
        def score(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor | None]:
            scores = score_tokens(
                hidden_ND,
                weight_VD,
                targets_N,
                max_logits_mib=work.max_logits_mib,
                entropy="gradient" if work.entropy else "none",
                compiled=compiled,
            )
            return scores.logprobs_N, scores.entropy_N

        return score

    return {"plain": plain, "eager": in_blocks(compiled=False), "compiled": in_blocks(compiled=True)}
