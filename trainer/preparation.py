"""From a batch to what the updates of its step need: rewards, old logprobs, correction, advantages, resampling.

Everything here lies on the CPU and is the same on every rank; only logprobs are computed on the device, by all.
Dimensions: B samples, R response tokens, K parts of the reward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.adapters.lora import adapter_off
from trainer.advantages import AdvantageInputs, AdvantageOptions, estimator_of, has_token_baseline, reads_logprobs
from trainer.batch import Batch, Trajectory, collate
from trainer.config import AlgorithmConfig, TrainerConfig
from trainer.configs.correction import CorrectionConfig
from trainer.corrections import correct, truncated_weights
from trainer.losses.aggregate import EPSILON
from trainer.losses.kl import kl_penalty
from trainer.metrics import StepMetrics, batch_metrics
from trainer.randomness import step_generator
from trainer.rewards.baselines import baseline_metrics, baselines, split
from trainer.rewards.overlong import overlong_metrics, overlong_penalty
from trainer.rewards.parts import part_metrics, reward_parts
from trainer.rewards.resampling import resample, resampling_metrics
from trainer.scoring import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Constants of one step, by sample of the batch that is trained on."""

    batch: Batch
    trajectories: Sequence[Trajectory]
    advantages_BR: Tensor
    returns_BR: Tensor
    old_BR: Tensor | None
    """Denominator of the PPO ratio; None: the logprobs of the one update themselves."""
    sampled_BR: Tensor | None
    """Tokens that counted before some were rejected; None: none could be."""
    values_BR: Tensor | None
    """The critic's, from before its updates; None: there is no critic."""
    metrics: StepMetrics


class Preparation:
    """Of one run's batches, as its config says."""

    def __init__(
        self, config: TrainerConfig, scorer: Scorer, values_of: Callable[[Batch], Tensor] | None = None
    ) -> None:
        """`values_of`: of a critic, for the estimator."""
        self._algorithm: AlgorithmConfig = config.algorithm
        self._seed = config.seed
        self._with_adapter = config.lora is not None
        self._scorer = scorer
        self._values_of = values_of
        estimator = config.algorithm.adv_estimator
        self._estimate = estimator_of(estimator)
        self._reads_logprobs = reads_logprobs(estimator, self._estimate)
        self._token_baseline = has_token_baseline(estimator, self._estimate)
        self._options = AdvantageOptions(
            norm_by_std=config.algorithm.norm_adv_by_std,
            gamma=config.algorithm.gamma,
            lam=config.algorithm.gae_lambda,
            part_weights=tuple(config.algorithm.gdpo_weights.values()),
            reward_weight=config.algorithm.distillation_reward_weight,
        )
        self._correction = CorrectionConfig() if config.algorithm.loss == "bypass" else config.algorithm.correction
        """What comes before the updates; `bypass` corrects within each."""

    def __call__(
        self, trajectories: Sequence[Trajectory], *, step: int, policy_version: int, kl_coef: float
    ) -> Prepared:
        """Raises ValueError where the KL is used and a trajectory has no reference logprobs, or gdpo and a part of the
        reward is missing, or remax and the greedy sample of a group."""
        trajectories, greedy = split(trajectories)
        batch, metrics = self._shaped(self._referred(collate(trajectories)))
        metrics |= batch_metrics(trajectories, policy_version=policy_version) | baseline_metrics(greedy)
        own = self._own_scores(batch) if self._reads_logprobs else None
        old_BR = self._old_logprobs(batch, own)
        token_rewards_BR, reward_metrics = self._token_rewards(batch, old_BR, kl_coef)
        sampled_BR = None
        if self._correction.on and old_BR is not None:
            found = correct(self._correction, batch, old_BR, trajectories, policy_version=policy_version)
            sampled_BR = batch.mask_BR
            batch = replace(batch, mask_BR=found.mask_BR, weights_BR=found.weights_BR)
            metrics |= found.metrics
        values_BR = None if self._values_of is None else self._values_of(batch)
        parts_BK, part_figures = self._parts(trajectories)
        advantages = self._estimate(
            AdvantageInputs(
                token_rewards_BR=token_rewards_BR,
                mask_BR=batch.mask_BR,
                group_B=batch.group_B,
                reward_parts_BK=parts_BK,
                baseline_B=self._baselines(greedy, batch),
                logprobs_BR=None if own is None else own[0],
                square_sums_BR=None if own is None or not self._token_baseline else own[1],
                values_BR=values_BR,
                importance_weights_BR=None if own is None else self._loss_weights(batch, own[0]),
                reference_logprobs_BR=batch.reference_logprobs_BR,
            ),
            self._options,
        )
        prepared = Prepared(
            batch=batch,
            trajectories=trajectories,
            advantages_BR=advantages.advantages_BR,
            returns_BR=advantages.returns_BR,
            old_BR=old_BR,
            sampled_BR=sampled_BR,
            values_BR=values_BR,
            metrics=metrics | part_figures | reward_metrics | advantages.metrics,
        )
        return prepared if self._algorithm.resample == "none" else self._resampled(prepared, step)

    def _referred(self, batch: Batch) -> Batch:
        """With the start model's logprobs, where it is the reference: the trained one with its adapter off."""
        if batch.reference_logprobs_BR is not None or not self._with_adapter or self._algorithm.kl_use == "none":
            return batch
        with adapter_off(self._scorer.policy):
            return replace(batch, reference_logprobs_BR=self._scorer.logprobs(batch, torch.arange(batch.size)))

    def _shaped(self, batch: Batch) -> tuple[Batch, StepMetrics]:
        """The batch with the penalty of long responses in its rewards."""
        overlong = self._algorithm.overlong
        if overlong is None:
            return batch, {}
        penalty_B = overlong_penalty(batch.response_lengths_B, **overlong.model_dump())
        return replace(batch, rewards_B=batch.rewards_B + penalty_B.to(batch.rewards_B)), overlong_metrics(penalty_B)

    def _baselines(self, greedy: Sequence[Trajectory], batch: Batch) -> Tensor | None:
        """The reward that each sample is compared with, [B]."""
        overlong = self._algorithm.overlong
        return baselines(greedy, batch.group_B, overlong=overlong) if self._algorithm.with_baseline else None

    def _own_scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logprobs of the present weights and, for a token baseline, sums of squared probabilities, [B, R]."""
        return self._scorer.scores(batch, torch.arange(batch.size), square_sums=self._token_baseline)

    def _old_logprobs(self, batch: Batch, own: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """Where they are wanted before it is known which samples have a gradient."""
        if self._algorithm.old_logprobs == "behaviour":
            return batch.behaviour_logprobs_BR
        if own is not None:
            return own[0]
        if self._algorithm.kl_in_reward or self._correction.on:
            return self._scorer.logprobs(batch, torch.arange(batch.size))
        return None

    def _token_rewards(self, batch: Batch, old_BR: Tensor | None, kl_coef: float) -> tuple[Tensor, StepMetrics]:
        """The reward on each last response token, less the KL of counted tokens when it is a reward."""
        rewards_BR = torch.zeros_like(batch.mask_BR)
        rewards_BR.scatter_(1, batch.response_lengths_B[:, None] - 1, batch.rewards_B[:, None])
        algorithm = self._algorithm
        if algorithm.kl_use == "none":
            return rewards_BR, {}
        if batch.reference_logprobs_BR is None:
            raise ValueError(f"kl_use={algorithm.kl_use!r} needs reference logprobs in every trajectory")
        if not algorithm.kl_in_reward or old_BR is None:
            return rewards_BR, {}
        kl_BR = kl_penalty(old_BR, batch.reference_logprobs_BR, estimator=algorithm.kl_estimator) * batch.mask_BR
        return rewards_BR - kl_coef * kl_BR, {
            "kl_in_reward": float(kl_BR.sum() / batch.mask_BR.sum().clamp(min=1)),
            "kl_in_reward_sample_mean": float((kl_BR.sum(-1) / (batch.mask_BR.sum(-1) + EPSILON)).mean()),
            "kl_coef": kl_coef,
        }

    def _parts(self, trajectories: Sequence[Trajectory]) -> tuple[Tensor | None, StepMetrics]:
        """The parts of the reward that gdpo norms by themselves, [B, K]."""
        names = tuple(self._algorithm.gdpo_weights)
        if not names:
            return None, {}
        parts_BK = reward_parts(trajectories, names)
        return parts_BK, part_metrics(parts_BK, names)

    def _loss_weights(self, batch: Batch, logprobs_BR: Tensor) -> Tensor | None:
        """What the loss will multiply the tokens with for their sampler's age."""
        if self._algorithm.loss == "decoupled":
            return truncated_weights(logprobs_BR, batch.behaviour_logprobs_BR, cap=self._algorithm.importance_cap)
        return batch.weights_BR

    def _resampled(self, prepared: Prepared, step: int) -> Prepared:
        """The samples that the updates see, drawn anew."""
        rows_B = resample(
            prepared.batch.rewards_B,
            method=self._algorithm.resample,
            power=self._algorithm.resample_power,
            generator=step_generator(self._seed, step),
        )
        old_BR, sampled_BR, values_BR = prepared.old_BR, prepared.sampled_BR, prepared.values_BR
        return replace(
            prepared,
            batch=prepared.batch.take(rows_B),
            trajectories=[prepared.trajectories[row] for row in rows_B.tolist()],
            advantages_BR=prepared.advantages_BR[rows_B],
            returns_BR=prepared.returns_BR[rows_B],
            old_BR=None if old_BR is None else old_BR[rows_B],
            sampled_BR=None if sampled_BR is None else sampled_BR[rows_B],
            values_BR=None if values_BR is None else values_BR[rows_B],
            metrics=prepared.metrics | resampling_metrics(rows_B),
        )
