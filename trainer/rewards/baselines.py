"""Greedy samples: they come with a batch for their reward alone, which is the baseline of their group (remax).

Dimensions: B samples that are trained on, G groups.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.batch import Trajectory
from trainer.config import OverlongConfig
from trainer.metrics import StepMetrics
from trainer.rewards.overlong import overlong_penalty


def split(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """(those to train on, the greedy ones), each in its order."""
    trained = [one for one in trajectories if not one.baseline]
    return trained, [one for one in trajectories if one.baseline]


def baselines(greedy: Sequence[Trajectory], group_B: Tensor, *, overlong: OverlongConfig | None = None) -> Tensor:
    """The reward of the greedy sample of each sample's group, float32 [B], less the penalty that a long one has.

    Raises ValueError where a group has none.
    """
    rewards_G = torch.tensor([one.reward for one in greedy], dtype=torch.float32)
    if overlong is not None:
        lengths_G = torch.tensor([len(one.response_ids) for one in greedy])
        rewards_G = rewards_G + overlong_penalty(lengths_G, **overlong.model_dump()).to(rewards_G)
    place = {one.group: index for index, one in enumerate(greedy)}
    if lacking := sorted(set(group_B.tolist()) - place.keys()):
        raise ValueError(f"no greedy sample came for the groups {lacking}")
    return rewards_G[torch.tensor([place[group] for group in group_B.tolist()])]


def baseline_metrics(greedy: Sequence[Trajectory]) -> StepMetrics:
    """Mean reward of the greedy samples, where there are any."""
    return {"baseline_reward_mean": sum(one.reward for one in greedy) / len(greedy)} if greedy else {}
