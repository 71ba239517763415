"""Tokens a second of the engine against transformers' own `generate` on the same batch, in alternating pairs."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from services.bench.report import spread, write

SHAPES = {"demo": (32, 8, 6, 5), "long": (64, 1, 12, 128)}
"""name -> (prompts, samples of each, prompt tokens, response tokens)."""


def bench_generate(*, rounds: int, threads: int, out: Path | None) -> int:
    """Measure every shape; random weights of the demo's size, end token ignored so that both do the same work."""
    import torch

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        from trainer.small.tiny import make_tiny_qwen3

        model = make_tiny_qwen3(scratch)
        figures = {
            name: asyncio.run(one_shape(str(model), shape, rounds=rounds, threads=threads))
            for name, shape in SHAPES.items()
        }
    return write(out, "rollout", {"threads": threads, "rounds": rounds, "shapes": figures})


async def one_shape(model: str, shape: tuple[int, int, int, int], *, rounds: int, threads: int) -> dict[str, Any]:
    """Seconds and tokens a second of both, and their ratio pair by pair (above 1: the engine is faster)."""
    import numpy as np

    from rollout.config import RolloutConfig
    from rollout.engines.hf import HfEngine

    prompts, samples, prompt_tokens, response_tokens = shape
    config = RolloutConfig(model=model, threads=threads, max_num_seqs=prompts * samples, max_model_len=256)
    engine = HfEngine.from_pretrained(model, config)
    draw = np.random.default_rng(0)
    tokens = draw.integers(4, engine.vocab_size, size=(prompts, prompt_tokens), dtype=np.int32)
    await engine.start()
    bare = Bare(model, tokens.repeat(samples, axis=0), response_tokens)
    ours, theirs = [], []
    for _ in range(rounds + 1):
        ours.append(await engine_seconds(engine, tokens, samples=samples, response_tokens=response_tokens))
        theirs.append(await asyncio.to_thread(bare.seconds))
    await engine.close()
    ours, theirs = ours[1:], theirs[1:]
    total = prompts * samples * response_tokens
    return {
        "samples": prompts * samples,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "engine_seconds": spread(ours),
        "generate_seconds": spread(theirs),
        "engine_tokens_per_s": spread([total / seconds for seconds in ours], digits=0),
        "generate_tokens_per_s": spread([total / seconds for seconds in theirs], digits=0),
        "engine_over_generate": spread([other / one for one, other in zip(ours, theirs, strict=True)], digits=2),
    }


async def engine_seconds(engine: Any, tokens: Any, *, samples: int, response_tokens: int) -> float:
    from rollout.engine import Request
    from rollout.sampling import SamplingParams

    sampling = SamplingParams(max_tokens=response_tokens, ignore_eos=True)
    requests = [
        Request(request_id=index, prompt_ids=tokens[index // samples], sampling=sampling, seed=index)
        for index in range(len(tokens) * samples)
    ]
    began = time.perf_counter()
    engine.submit(requests)
    done = 0
    while done < len(requests):
        done += len(await engine.finished())
    return time.perf_counter() - began


class Bare:
    """transformers' own loop on the same prompts."""

    def __init__(self, model: str, tokens: Any, response_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model)
        self._tokens = torch.from_numpy(tokens).long()
        self._response_tokens = response_tokens

    def seconds(self) -> float:
        import torch

        began = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                input_ids=self._tokens,
                attention_mask=torch.ones_like(self._tokens),
                do_sample=True,
                top_k=0,
                min_new_tokens=self._response_tokens,
                max_new_tokens=self._response_tokens,
            )
        return time.perf_counter() - began
