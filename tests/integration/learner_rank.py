"""One rank of a learner, started by torchrun; told by one JSON argument. Rank 0 writes metrics and whole weights."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.batch import Trajectory
from trainer.config import AlgorithmConfig, TrainerConfig
from trainer.configs.critic import CriticConfig
from trainer.configs.parallel import ParallelConfig
from trainer.configs.update import OptimizerConfig
from trainer.critic.model import ValueModel
from trainer.model.load import pick_device
from trainer.parallel.start import own_device, seat, start
from trainer.step import Learner

VOCABULARY = 17


def trajectories(seed: int, *, samples: int, reward: float | None = None) -> list[Trajectory]:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 9, samples)
    return [
        Trajectory(
            sample=f"s{index}",
            group=index // 2,
            prompt_ids=draw.integers(0, VOCABULARY, draw.integers(1, 9)).astype(np.int32),
            response_ids=draw.integers(0, VOCABULARY, length).astype(np.int32),
            behaviour_logprobs=-3.5 * draw.random(length).astype(np.float32),
            loss_mask=(draw.random(length) < 0.8).astype(np.uint8),
            reward=float(draw.random()) if reward is None else reward,
            reference_logprobs=-3.5 * draw.random(length).astype(np.float32),
            spans=((0, int(length)),),
            stop_reason="stop",
        )
        for index, length in enumerate(lengths)
    ]


def make_model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            initializer_range=0.4,
            tie_word_embeddings=True,
        )
    )


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model()
    critic = CriticConfig(head_init=0.3, epochs=2) if spec.get("critic") else None
    config = TrainerConfig(
        model="tiny",
        device=spec.get("device", "cpu"),
        max_tokens_per_microbatch=32,
        gradient_checkpointing=True,
        recomputed_share=0.5,
        parallel=ParallelConfig(deadline_seconds=60, **spec.get("parallel", {})),
        offload=spec.get("offload", "none"),
        algorithm=AlgorithmConfig(
            adv_estimator="grpo" if critic is None else "gae",
            **{"minibatches": 2, "kl_use": "loss", "kl_coef": 0.1, "entropy_coef": 0.01, **spec.get("algorithm", {})},
        ),
        critic=critic,
        optimizer=OptimizerConfig(lr=3e-4),
    )
    device = pick_device(own_device(config, seat()))
    ranks = start(seat(), config, device=device)
    value_model = None if critic is None else ValueModel(make_model().to(device), critic, seed=0)
    learner = Learner(model.to(device), config, ranks, critic=value_model)
    told = [
        learner.train(trajectories(step, samples=samples, reward=reward), step=step, policy_version=step)
        for step, (samples, reward) in enumerate(zip((16, 15, 2, 6), spec.get("rewards", [None] * 4), strict=True))
    ]
    whole = {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu().clone()
        for trained in (model, value_model)
        if trained is not None
        for name, parameter in trained.named_parameters()
    }
    if ranks.leads:
        folder = Path(spec["folder"])
        (folder / "metrics.json").write_text(json.dumps(told))
        save_file(whole, folder / "weights.safetensors")
    if ranks.size > 1:
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
