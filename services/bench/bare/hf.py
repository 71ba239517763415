"""transformers' own `generate` with the settings of a run, with the sampled tokens' logprobs and without."""

from __future__ import annotations

import time
from typing import Any

from services.bench.bare.job import Answer, Job, answering
from services.bench.bare.work import Prompts, config_of, rounds_of, timed


def work(job: Job) -> Answer:
    """Tokens a second round by round, for each way to sample."""
    import torch
    import transformers

    config = config_of(job)
    torch.set_num_threads(config.rollout.threads or torch.get_num_threads())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(config.rollout.model).to(device)
    started = time.perf_counter() - began
    rounds, sampling = rounds_of(config, job["rounds"] + 1), config.rollout.sampling
    length: dict[str, Any] = {"max_new_tokens": sampling.max_tokens, "do_sample": True, "top_k": 0}
    if sampling.ignore_eos:
        length["min_new_tokens"] = sampling.max_tokens

    def generate(prompts: Prompts, *, logprobs: bool) -> int:
        ids = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            made = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                return_dict_in_generate=True,
                output_logits=logprobs,
                **length,
            )
            response = made.sequences[:, ids.shape[1] :]
            if logprobs:
                for at, logits in enumerate(made.logits):
                    logits.log_softmax(-1).gather(-1, response[:, at, None])
        return int(response.numel())

    rates = {
        "logprobs": timed(rounds, lambda prompts: generate(prompts, logprobs=True)),
        "no_logprobs": timed(rounds, lambda prompts: generate(prompts, logprobs=False)),
    }
    return {"tokens_per_s": rates, "start_seconds": started, "version": transformers.__version__}


if __name__ == "__main__":
    answering(work)
