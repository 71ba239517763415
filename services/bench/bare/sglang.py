"""SGLang offline with the engine settings of a run: `Engine.generate`, with and without the tokens' logprobs."""

from __future__ import annotations

import time
from functools import partial

from services.bench.bare.job import Answer, Job, answering
from services.bench.bare.work import Prompts, config_of, rounds_of, timed


def work(job: Job) -> Answer:
    """Tokens a second round by round, for each way to sample."""
    from rollout.engines.sglang_args import arguments, set_environment

    config = config_of(job)
    longest = config.rollout.max_model_len
    assert longest is not None, "a bench says how long samples are"
    set_environment()
    began = time.perf_counter()
    from sglang import Engine, __version__

    engine = Engine(**arguments(config.rollout.model, config.rollout, max_model_len=longest, with_tokenizer=False))
    started = time.perf_counter() - began
    sampling = config.rollout.sampling
    params = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "ignore_eos": sampling.ignore_eos,
    }

    def generate(logprobs: bool, prompts: Prompts) -> int:
        outputs = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=logprobs)
        return sum(len(output["output_ids"]) for output in outputs)

    rounds = rounds_of(config, job["rounds"] + 1)
    ways = {"logprobs": True, "no_logprobs": False}
    rates = {name: timed(rounds, partial(generate, logprobs)) for name, logprobs in ways.items()}
    engine.shutdown()
    return {"tokens_per_s": rates, "start_seconds": started, "version": __version__}


if __name__ == "__main__":
    answering(work)
