"""What an advantage estimator is given, gathered sample by sample from recorded trajectories.

Dimensions: B samples that are trained on, R response tokens, K parts of the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import protos
from protos.arrays import from_array
from tests.e2e.plain_grpo import next_logprobs, over_greedy, response_logprobs
from trainer.advantages import AdvantageInputs


@torch.no_grad()
def inputs_of(
    model: torch.nn.Module, trajectories: list[protos.Trajectory], parts: Sequence[str] = ()
) -> AdvantageInputs:
    """Rewards on the last tokens; logprobs and sums of squared probabilities under `model`."""
    samples = [sample for sample in trajectories if not sample.baseline]
    width = max(sample.response_ids.shape[0] for sample in samples)

    def rows(of: Callable[[protos.Trajectory], Tensor]) -> Tensor:
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in map(of, samples)])

    def weights(sample: protos.Trajectory) -> Tensor:
        behaviour_R = torch.tensor(from_array(sample.behaviour_logprobs))
        return (response_logprobs(model, sample) - behaviour_R).exp().clamp(max=2.0)

    rewards_B = torch.tensor([sample.reward for sample in samples])
    greedy = any(sample.baseline for sample in trajectories)
    return AdvantageInputs(
        token_rewards_BR=rows(lambda one: torch.eye(one.response_ids.shape[0])[-1] * one.reward),
        mask_BR=rows(lambda one: torch.ones(one.response_ids.shape[0])),
        group_B=torch.tensor([sample.key.group for sample in samples]),
        reward_parts_BK=torch.tensor([[sample.reward_breakdown[name] for name in parts] for sample in samples]),
        logprobs_BR=rows(lambda one: response_logprobs(model, one)),
        square_sums_BR=rows(lambda one: next_logprobs(model, one).exp().square().sum(-1)),
        importance_weights_BR=rows(weights),
        baseline_B=rewards_B - torch.tensor(over_greedy(trajectories)) if greedy else None,
    )
