"""What tests of checkpoints and adapters share: the size of a tiny model, and a step of training on random samples."""

import numpy as np

from trainer.batch import Trajectory
from trainer.small.tiny import TinyShape
from trainer.step import Learner

SHAPE = TinyShape(
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_positions=32,
    initializer_range=0.3,
)


def train(learner: Learner, step: int) -> dict[str, float]:
    draw = np.random.default_rng(step)
    batch = [
        Trajectory(
            sample=str(index),
            group=index // 4,
            prompt_ids=draw.integers(0, 11, 3).astype(np.int32),
            response_ids=draw.integers(0, 11, 3).astype(np.int32),
            behaviour_logprobs=np.full(3, -2.4, np.float32),
            reward=float(draw.random()),
            spans=((step, 3),),
            stop_reason="stop",
        )
        for index in range(8)
    ]
    return learner.train(batch, step=step, policy_version=step)
