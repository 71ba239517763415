"""Our own training step under the clock of its baseline: the same tokens through `Learner.train`."""

from __future__ import annotations

from itertools import count

import numpy as np
import torch.distributed as dist

from services.bench.bare.clock import clocked, token_ids
from services.bench.bare.job import Answer, Job, answering
from trainer.batch import Trajectory
from trainer.config import TrainerConfig
from trainer.model.load import load_model, prepare_process
from trainer.parallel.start import own_device, seat, start
from trainer.step import Learner

GROUP_SIZE = 8


def our_loop(job: Job) -> Answer:
    """Seconds of each step at this rank, taken as a trainer service takes it."""
    config, place = TrainerConfig.model_validate(job["trainer"]), seat()
    prepare_process(threads=config.threads, seed=config.seed)
    attention, where = config.attn_implementation, own_device(config, place)
    model = load_model(config.model, dtype=config.dtype, attn_implementation=attention, device=where)
    device, num_parameters = next(model.parameters()).device, sum(one.numel() for one in model.parameters())
    batch, steps = trajectories(job, vocab_size=model.config.vocab_size), count(1)  # type: ignore[union-attr, arg-type]
    learner = Learner(model, config, start(place, config, device=device))

    def step() -> float:
        at = next(steps)
        metrics = learner.train(batch, step=at, policy_version=at - 1)
        if metrics["skipped"]:
            raise ValueError("the update was not finite: what was timed is not a whole step")
        return metrics["loss"]

    answer = clocked(step, job, device=device)
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"num_parameters": num_parameters, **answer}


def trajectories(job: Job, *, vocab_size: int) -> list[Trajectory]:
    """Every sample of a step, as every rank has it; rewards are random, so that every sample has a gradient."""
    ids_BT, prompt, response = token_ids(job, vocab_size=vocab_size), job["prompt_tokens"], job["response_tokens"]
    rewards = np.random.default_rng(1).uniform(size=len(ids_BT))
    return [
        Trajectory(
            sample=f"sample-{row}",
            group=row // GROUP_SIZE,
            prompt_ids=ids[:prompt],
            response_ids=ids[prompt:],
            behaviour_logprobs=np.full(response, -np.log(vocab_size), np.float32),
            reward=float(rewards[row]),
            spans=((0, response),),
            stop_reason="length",
        )
        for row, ids in enumerate(ids_BT)
    ]


if __name__ == "__main__":
    answering(our_loop)
