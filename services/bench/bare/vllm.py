"""vLLM offline with the engine settings of a run: `LLM.generate`, with the sampled tokens' logprobs and without.

In its leanest form: no text, logprobs as flat arrays.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from services.bench.bare.job import Answer, Job, answering
from services.bench.bare.work import Prompts, config_of, rounds_of, timed

if TYPE_CHECKING:
    from services.config import Config


def work(job: Job) -> Answer:
    """Tokens a second round by round, for each way to sample."""
    config = config_of(job)
    began = time.perf_counter()
    settings = engine_settings(config)
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(**settings, logprobs_mode="processed_logprobs", disable_log_stats=True)
    started = time.perf_counter() - began
    sampling, rounds = config.rollout.sampling, rounds_of(config, job["rounds"] + 1)
    plain: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "max_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
    }
    ways = {"logprobs": SamplingParams(**plain, logprobs=0, flat_logprobs=True), "no_logprobs": SamplingParams(**plain)}

    def generate(params: SamplingParams, prompts: Prompts) -> int:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    rates = {name: timed(rounds, partial(generate, way)) for name, way in ways.items()}
    return {"tokens_per_s": rates, "start_seconds": started, "version": __version__}


def engine_settings(config: Config) -> dict[str, Any]:
    """Of vLLM, as the rollout service starts it. To be called before vLLM is imported."""
    from rollout.engines.vllm_args import arguments, set_environment
    from rollout.engines.vllm_model import read_facts

    set_environment(config.rollout)
    model = config.rollout.model
    return {"model": model, **arguments(config.rollout, own_dtype=read_facts(model).dtype)}


if __name__ == "__main__":
    answering(work)
