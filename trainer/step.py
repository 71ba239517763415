"""One training step from trajectories to new weights.

collate -> rewards (- KL) -> correction -> values -> advantages     trainer/preparation.py, on the CPU
[ the critic's own updates ]                                        trainer/critic/updates.py, where there is one
[ micro-batches -> forward, loss, backward ] -> clip -> AdamW -> metrics     trainer/updates.py, on the device
"""

from collections.abc import Sequence

import torch
from torch import nn

from trainer.batch import Trajectory
from trainer.config import TrainerConfig
from trainer.critic.model import ValueModel
from trainer.critic.updates import Critic
from trainer.guarding.guards import Guards
from trainer.guarding.mismatch import Mismatch, mismatches
from trainer.metrics import StepMetrics
from trainer.model.offload import Offload
from trainer.model.policy import Policy
from trainer.model.ready import make_ready
from trainer.optimization import Optimization
from trainer.optimizer import build_optimizer, learning_rate
from trainer.parallel import ALONE, Ranks
from trainer.preparation import Preparation, Prepared
from trainer.rewards.kl_control import adapted
from trainer.scoring import Scorer
from trainer.updates import Updates


class Learner:
    """Holds the trained model, its optimizer and its place in the learning-rate schedule."""

    def __init__(
        self, model: nn.Module, config: TrainerConfig, ranks: Ranks = ALONE, critic: ValueModel | None = None
    ) -> None:
        """Recomputes, compiles and shards the models' layers as the config says. Leaves the global seeds alone.

        `critic` comes with the config's section of that name.
        """
        self.model = model
        self.config = config
        self.ranks = ranks
        self.policy, device = prepared_policy(model, config, ranks)
        self.optimizer = build_optimizer(model, config.optimizer)
        self.schedule_position = 0
        self.kl_coef = config.algorithm.kl_coef
        """Weight of the KL in the reward; moves where there is a `kl_target`, and is then part of the checkpoint."""
        self.mismatches: list[Mismatch] = []
        """Of the newest step: behaviour logprobs beside those of the weights that it began with, by rollout server."""
        self.guards = Guards(config.guards)
        self._scorer = Scorer(self.policy, max_tokens=config.max_tokens_per_microbatch, device=device, ranks=ranks)
        self.critic = None if critic is None else Critic(critic, config, self._scorer, self.guards)
        self._prepare = Preparation(config, self._scorer, None if self.critic is None else self.critic.values)
        self._offload = Offload(model, self.optimizer, config.offload if ranks.mesh is None else "none")
        self._optimization = Optimization(
            self._scorer, self.optimizer, self._offload, self.guards, max_grad_norm=config.optimizer.max_grad_norm
        )

    def train(self, trajectories: Sequence[Trajectory], *, step: int, policy_version: int) -> StepMetrics:
        """Makes `epochs * minibatches` optimizer updates on one batch and gives the step's figures.

        `policy_version` is the trainer's before this step; staleness counts from it. Every rank is given the same.
        Raises ValueError when the KL is used and a trajectory has no reference logprobs, or gdpo and one lacks a part
        of the reward. Updates whose loss or gradient norm is not finite are left out and counted in `skipped`; while a
        critic warms up, the policy and its schedule stay where they are.
        """
        self._offload.bring_weights()
        prepared = self._prepare(trajectories, step=step, policy_version=policy_version, kl_coef=self.kl_coef)
        self.guards.begin([trajectory.sample for trajectory in prepared.trajectories])
        next_kl_coef = self._next_kl_coef(prepared.metrics, samples=len(prepared.trajectories))
        metrics = {"step": float(step), "policy_version": float(policy_version)} | prepared.metrics
        waits = self.critic is not None and self.critic.warms_up
        if self.critic is not None:
            metrics |= self.critic.train(prepared)
        if waits:
            self.mismatches = []
            left_out = self.config.algorithm.epochs * min(self.config.algorithm.minibatches, prepared.batch.size)
            metrics |= {"updates": 0.0, "skipped": 0.0, "updates_left_out": float(left_out)}
            return metrics | self.guards.look(metrics)
        metrics |= self._update(prepared, step=step, policy_version=policy_version)
        metrics |= self.guards.look(metrics)
        self.schedule_position, self.kl_coef = self.schedule_position + 1, next_kl_coef
        return metrics

    def _update(self, prepared: Prepared, *, step: int, policy_version: int) -> StepMetrics:
        """The policy's updates and their figures."""
        lr = learning_rate(self.schedule_position, self.config.optimizer)
        updates = Updates(self.config, self._scorer, self._optimization, prepared, step=step)
        updates.run(lr=lr)
        self.mismatches = mismatches(*updates.differences(), prepared.trajectories, policy_version=policy_version)
        return {"lr": lr} | updates.metrics()

    def rest(self) -> None:
        """Give the device back what `offload` says, until the next step; weights are packed for a push before."""
        self._offload.leave()
        if self.critic is not None:
            self.critic.rest()

    def _next_kl_coef(self, found: StepMetrics, *, samples: int) -> float:
        algorithm = self.config.algorithm
        if algorithm.kl_target is None:
            return self.kl_coef
        kl = found["kl_in_reward_sample_mean"]
        return adapted(self.kl_coef, kl, target=algorithm.kl_target, horizon=algorithm.kl_horizon, samples=samples)


def prepared_policy(model: nn.Module, config: TrainerConfig, ranks: Ranks) -> tuple[Policy, torch.device]:
    """The model as it is trained, and the device that it computes on."""
    device = next(model.parameters()).device
    policy = Policy(
        model,
        temperature=config.algorithm.temperature,
        max_logits_mib=config.max_logits_mib,
        compiled=config.compile,
    )
    make_ready(policy, model, config, ranks, offload=config.offload != "none")
    return policy, device
