"""One training step from trajectories to new weights.

reward (- KL) -> correction -> advantages -> [ micro-batches -> forward, loss, backward ] -> clip -> AdamW -> metrics

Dimensions: B samples, T tokens, R response tokens, N counted response tokens. The batch and everything computed from
rewards stay on the CPU; micro-batches go to the device. Losses are divided by counts of the whole batch, so neither the
split into micro-batches nor one over ranks changes the gradient.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from trainer.advantages import ESTIMATORS, TOKEN_BASELINES, AdvantageInputs, AdvantageOptions
from trainer.batch import Batch, Trajectory, collate
from trainer.config import AlgorithmConfig, TrainerConfig
from trainer.correction_config import CorrectionConfig
from trainer.corrections import correct, effective_sample_share, truncated_weights
from trainer.kl_control import adapted
from trainer.logprobs import TokenScorer
from trainer.losses import LEARNS_WITHOUT_ADVANTAGE, LOSSES, Denominators, LossInputs, LossOptions
from trainer.losses.aggregate import EPSILON
from trainer.losses.kl import kl_penalty
from trainer.losses.objective import objective
from trainer.metrics import StepMetrics, Tally, absolute_differences, batch_metrics
from trainer.mismatch import Mismatch, mismatches
from trainer.offload import Offload
from trainer.optimizer import build_optimizer, learning_rate, update
from trainer.overlong import overlong_metrics, overlong_penalty
from trainer.packing import MicroBatch, micro_batch, pack
from trainer.randomness import step_generator
from trainer.resampling import resample, resampling_metrics
from trainer.reward_parts import part_metrics, reward_parts


class Learner:
    """Holds the trained model, its optimizer and its place in the learning-rate schedule."""

    def __init__(self, model: nn.Module, config: TrainerConfig) -> None:
        """Turns on gradient checkpointing when the config asks for it. Leaves the global seeds alone."""
        algorithm = config.algorithm
        self.model = model
        self.config = config
        self.optimizer = build_optimizer(model, config.optimizer)
        self.schedule_position = 0
        self.kl_coef = algorithm.kl_coef
        """Weight of the KL in the reward; moves where there is a `kl_target`, and is then part of the checkpoint."""
        self.mismatches: list[Mismatch] = []
        """Of the newest step: behaviour logprobs beside those of the weights that it began with, by rollout server."""
        self._estimate = ESTIMATORS[algorithm.adv_estimator]
        self._policy_loss = LOSSES[algorithm.loss]
        self._advantage_options = AdvantageOptions(
            norm_by_std=algorithm.norm_adv_by_std,
            gamma=algorithm.gamma,
            part_weights=tuple(algorithm.gdpo_weights.values()),
        )
        self._part_names = tuple(algorithm.gdpo_weights)
        self._loss_options = _loss_options(algorithm)
        self._correction = CorrectionConfig() if algorithm.loss == "bypass" else algorithm.correction
        """What comes before the updates; `bypass` corrects within each."""
        self._device = next(model.parameters()).device
        model.train(config.gradient_checkpointing)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self._scorer = TokenScorer(model, temperature=algorithm.temperature, max_logits_mib=config.max_logits_mib)
        self._offload = Offload(model, self.optimizer, config.offload)

    def train(self, trajectories: Sequence[Trajectory], *, step: int, policy_version: int) -> StepMetrics:
        """Makes `epochs * minibatches` optimizer updates on one batch and gives the step's figures.

        `policy_version` is the trainer's before this step; staleness counts from it. Raises ValueError when the KL is
        used and a trajectory has no reference logprobs, or gdpo and one lacks a part of the reward. Updates whose loss
        or gradient norm is not finite are left out and counted in `skipped`.
        """
        self._offload.bring_weights()
        batch, shaping = self._shaped(collate(trajectories))
        metrics = {"step": float(step), "policy_version": float(policy_version)}
        metrics |= batch_metrics(trajectories, policy_version=policy_version) | shaping
        own = self._own_scores(batch) if self.config.algorithm.adv_estimator in TOKEN_BASELINES else None
        old_BR = self._old_logprobs_of_all(batch, own)
        token_rewards_BR, reward_metrics = self._token_rewards(batch, old_BR)
        next_kl_coef = self._next_kl_coef(reward_metrics, samples=len(trajectories))
        sampled_BR, corrections = batch.mask_BR, StepMetrics()
        if self._correction.on and old_BR is not None:
            found = correct(self._correction, batch, old_BR, trajectories, policy_version=policy_version)
            batch, corrections = replace(batch, mask_BR=found.mask_BR, weights_BR=found.weights_BR), found.metrics
        parts_BK = reward_parts(trajectories, self._part_names) if self._part_names else None
        if parts_BK is not None:
            metrics |= part_metrics(parts_BK, self._part_names)
        advantages = self._estimate(
            AdvantageInputs(
                token_rewards_BR=token_rewards_BR,
                mask_BR=batch.mask_BR,
                group_B=batch.group_B,
                reward_parts_BK=parts_BK,
                logprobs_BR=None if own is None else own[0],
                square_sums_BR=None if own is None else own[1],
                importance_weights_BR=None if own is None else self._loss_weights(batch, own[0]),
            ),
            self._advantage_options,
        )
        metrics |= reward_metrics | advantages.metrics
        advantages_BR = advantages.advantages_BR
        if self.config.algorithm.resample != "none":
            rows_B = self._resampled(batch, step)
            batch, trajectories = batch.take(rows_B), [trajectories[row] for row in rows_B.tolist()]
            advantages_BR, sampled_BR = advantages_BR[rows_B], sampled_BR[rows_B]
            old_BR = None if old_BR is None else old_BR[rows_B]
            metrics |= resampling_metrics(rows_B)
        run = self._updates(batch, advantages_BR, old_BR, step)
        if self._correction.on:  # a server that is far off is judged by its rejected tokens too
            run.compared_BR = sampled_BR
        metrics |= run.metrics() | corrections
        self.mismatches = mismatches(*run.differences(), trajectories, policy_version=policy_version)
        self.schedule_position, self.kl_coef = self.schedule_position + 1, next_kl_coef
        return metrics

    def rest(self) -> None:
        """Give the device back what `offload` says, until the next step; weights are packed for a push before."""
        self._offload.leave()

    def _shaped(self, batch: Batch) -> tuple[Batch, StepMetrics]:
        """The batch with the penalty of long responses in its rewards."""
        overlong = self.config.algorithm.overlong
        if overlong is None:
            return batch, {}
        penalty_B = overlong_penalty(batch.response_lengths_B, **overlong.model_dump())
        return replace(batch, rewards_B=batch.rewards_B + penalty_B.to(batch.rewards_B)), overlong_metrics(penalty_B)

    def _resampled(self, batch: Batch, step: int) -> Tensor:
        """Which samples the updates see, [B]."""
        method, power = self.config.algorithm.resample, self.config.algorithm.resample_power
        generator = step_generator(self.config.seed, step)
        return resample(batch.rewards_B, method=method, power=power, generator=generator)

    def _own_scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logprobs and sums of squared probabilities of the present weights, [B, R]."""
        return self._present_scores(batch, torch.arange(len(batch.rewards_B)), square_sums=True)

    def _loss_weights(self, batch: Batch, logprobs_BR: Tensor) -> Tensor | None:
        """What the loss will multiply the tokens with for their sampler's age."""
        algorithm = self.config.algorithm
        if algorithm.loss == "decoupled":
            return truncated_weights(logprobs_BR, batch.behaviour_logprobs_BR, cap=algorithm.importance_cap)
        return batch.weights_BR

    def _old_logprobs_of_all(self, batch: Batch, own: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """Where they are wanted before it is known which samples have a gradient."""
        if self.config.algorithm.old_logprobs == "behaviour":
            return batch.behaviour_logprobs_BR
        if own is not None:
            return own[0]
        if self.config.algorithm.kl_use == "reward" or self._correction.on:
            return self._proximal_logprobs(batch, torch.arange(len(batch.rewards_B)))
        return None

    def _token_rewards(self, batch: Batch, old_BR: Tensor | None) -> tuple[Tensor, StepMetrics]:
        """The reward on each last response token, less the KL of counted tokens when it is a reward."""
        rewards_BR = torch.zeros_like(batch.mask_BR)
        rewards_BR.scatter_(1, batch.response_lengths_B[:, None] - 1, batch.rewards_B[:, None])
        algorithm = self.config.algorithm
        if algorithm.kl_use == "none":
            return rewards_BR, {}
        if batch.reference_logprobs_BR is None:
            raise ValueError(f"kl_use={algorithm.kl_use!r} needs reference logprobs in every trajectory")
        if algorithm.kl_use != "reward" or old_BR is None:
            return rewards_BR, {}
        kl_BR = kl_penalty(old_BR, batch.reference_logprobs_BR, estimator=algorithm.kl_estimator) * batch.mask_BR
        return rewards_BR - self.kl_coef * kl_BR, {
            "kl_in_reward": float(kl_BR.sum() / batch.mask_BR.sum().clamp(min=1)),
            "kl_in_reward_sample_mean": float((kl_BR.sum(-1) / (batch.mask_BR.sum(-1) + EPSILON)).mean()),
            "kl_coef": self.kl_coef,
        }

    def _next_kl_coef(self, found: StepMetrics, *, samples: int) -> float:
        algorithm = self.config.algorithm
        if algorithm.kl_target is None:
            return self.kl_coef
        kl = found["kl_in_reward_sample_mean"]
        return adapted(self.kl_coef, kl, target=algorithm.kl_target, horizon=algorithm.kl_horizon, samples=samples)

    def _updates(self, batch: Batch, advantages_BR: Tensor, old_BR: Tensor | None, step: int) -> "_Run":
        algorithm = self.config.algorithm
        active_B = self._active(batch, advantages_BR)
        minibatches = min(algorithm.minibatches, len(active_B))
        if old_BR is None and algorithm.epochs * minibatches > 1:
            old_BR = self._proximal_logprobs(batch, active_B.nonzero().flatten())
        proximal_BR = old_BR if algorithm.old_logprobs == "proximal" else None
        run = _Run(batch, advantages_BR, old_BR, active_B, proximal_BR, step_generator(self.config.seed, step))
        for _ in range(algorithm.epochs):
            for rows in np.array_split(np.arange(len(active_B)), minibatches):
                self._update(run, torch.from_numpy(rows))
        return run

    def _active(self, batch: Batch, advantages_BR: Tensor) -> Tensor:
        """Which samples have a gradient that is not exactly zero, [B] bool."""
        counted_B = batch.mask_BR.any(-1)
        algorithm = self.config.algorithm
        if not algorithm.skip_zero_advantage or algorithm.kl_use == "loss" or algorithm.entropy_coef:
            return counted_B
        if algorithm.loss in LEARNS_WITHOUT_ADVANTAGE:
            return counted_B
        if algorithm.loss == "bypass" and algorithm.correction.normalize:
            return counted_B
        return counted_B & (advantages_BR * batch.mask_BR).any(-1)

    def _proximal_logprobs(self, batch: Batch, rows_B: Tensor) -> Tensor:
        """Logprobs of the present weights for these rows, [B, R] on the CPU, zero elsewhere."""
        return self._present_scores(batch, rows_B, square_sums=False)[0]

    @torch.no_grad()
    def _present_scores(self, batch: Batch, rows_B: Tensor, *, square_sums: bool) -> tuple[Tensor, Tensor]:
        """Logprobs, and sums of squared probabilities where they are asked for; [B, R] on the CPU, zero elsewhere."""
        logprobs_BR, squares_BR = torch.zeros_like(batch.mask_BR), torch.zeros_like(batch.mask_BR)
        for micro in self._micro_batches(batch, rows_B):
            scores = self._scorer(micro.input_ids_BT, micro.positions_N, micro.targets_N, square_sums=square_sums)
            logprobs_BR[micro.rows_B, : micro.width] = micro.scatter(scores.logprobs_N).to(logprobs_BR)
            if scores.square_sums_N is not None:
                squares_BR[micro.rows_B, : micro.width] = micro.scatter(scores.square_sums_N).to(squares_BR)
        return logprobs_BR, squares_BR

    def _micro_batches(self, batch: Batch, rows_B: Tensor) -> list[MicroBatch]:
        parts = pack(batch.lengths_B[rows_B], max_tokens=self.config.max_tokens_per_microbatch)
        return [micro_batch(batch, rows_B[part], device=self._device) for part in parts]

    def _update(self, run: "_Run", rows_B: Tensor) -> None:
        """One optimizer update on the samples `rows_B`; all of them count in the denominators."""
        mask_BR = run.batch.mask_BR[rows_B]
        denominators = Denominators(
            tokens=float(mask_BR.sum()),
            sequences=float(mask_BR.any(-1).sum()),
            samples=float(len(rows_B)),
            width=float(mask_BR.shape[1]),
        )
        loss = torch.zeros((), device=self._device)
        for micro in self._micro_batches(run.batch, rows_B[run.active_B[rows_B]]):
            loss += self._backward(run, micro, denominators)
        self._ensure_gradients()
        lr = learning_rate(self.schedule_position, self.config.optimizer)
        with self._offload.moments():
            norm, taken = update(self.optimizer, loss, lr=lr, max_grad_norm=self.config.optimizer.max_grad_norm)
        run.record(tokens=denominators.tokens, lr=lr, grad_norm=norm, taken=taken)

    def _backward(self, run: "_Run", micro: MicroBatch, denominators: Denominators) -> Tensor:
        entropy = "gradient" if self.config.algorithm.entropy_coef else "detached"
        scores = self._scorer(micro.input_ids_BT, micro.positions_N, micro.targets_N, entropy=entropy)  # type: ignore[arg-type]
        inputs = run.loss_inputs(micro, scores.logprobs_N, scores.entropy_N, denominators)
        outputs = objective(self._policy_loss, inputs, self._loss_options)
        outputs.loss.backward()  # type: ignore[no-untyped-call]
        run.tally.add(outputs.metrics, tokens=float(len(micro.slots_N)))
        return outputs.loss.detach()

    def _ensure_gradients(self) -> None:
        """Zeros where there is no gradient: AdamW's moments and weight decay act even on a batch without one."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


class _Run:
    """What the updates of one step share: the batch, its constants, and the figures that they add up."""

    def __init__(
        self,
        batch: Batch,
        advantages_BR: Tensor,
        old_BR: Tensor | None,
        active_B: Tensor,
        proximal_BR: Tensor | None,
        generator: torch.Generator,
    ) -> None:
        self.batch = batch
        self.generator = generator
        self.advantages_BR = advantages_BR
        self.old_BR = old_BR
        self.active_B = active_B
        self.proximal_BR = proximal_BR
        """Of the weights that the step began with; None: not computed apart from the loss."""
        self.compared_BR = batch.mask_BR * active_B[:, None]
        """Where they are compared with the behaviour's."""
        self.tally = Tally()
        self._differences: list[Tensor] = []
        self._rows: list[Tensor] = []
        """Which row of the batch each of the differences so far belongs to, until an update has moved the weights."""
        self._updates: list[tuple[float, float, float, bool]] = []

    def loss_inputs(
        self, micro: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor | None, denominators: Denominators
    ) -> LossInputs:
        logprobs_BR = micro.scatter(logprobs_N)
        behaviour_BR = self._cut(micro, self.batch.behaviour_logprobs_BR)
        self._differences.append((logprobs_N.detach() - behaviour_BR.flatten().index_select(0, micro.slots_N)).abs())
        if not self._updates:
            self._rows.append(micro.rows_B.to(micro.slots_N.device)[micro.slots_N // micro.width])
        reference_BR, weights_BR = self.batch.reference_logprobs_BR, self.batch.weights_BR
        return LossInputs(
            logprobs_BR=logprobs_BR,
            old_logprobs_BR=logprobs_BR.detach() if self.old_BR is None else self._cut(micro, self.old_BR),
            behaviour_logprobs_BR=behaviour_BR,
            advantages_BR=self._cut(micro, self.advantages_BR),
            mask_BR=self._cut(micro, self.batch.mask_BR),
            denominators=denominators,
            reference_logprobs_BR=None if reference_BR is None else self._cut(micro, reference_BR),
            weights_BR=None if weights_BR is None else self._cut(micro, weights_BR),
            generator=self.generator,
            entropy_BR=None if entropy_N is None else micro.scatter(entropy_N),
        )

    @staticmethod
    def _cut(micro: MicroBatch, values_BR: Tensor) -> Tensor:
        return values_BR[micro.rows_B, : micro.width].to(micro.slots_N.device, non_blocking=True)

    def record(self, *, tokens: float, lr: float, grad_norm: float, taken: bool) -> None:
        self._updates.append((tokens, lr, grad_norm, taken))

    def differences(self) -> tuple[Tensor, Tensor]:
        """|behaviour - trainer| logprobs before the first update: (row of the batch [N], difference [N])."""
        if self.proximal_BR is not None:
            rows_N, columns_N = self.compared_BR.nonzero(as_tuple=True)
            difference_BR = (self.proximal_BR - self.batch.behaviour_logprobs_BR).abs()
            return rows_N, difference_BR[rows_N, columns_N]
        known = len(self._rows)
        if not known:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        return torch.cat(self._rows), torch.cat(self._differences[:known])

    def metrics(self) -> StepMetrics:
        """Means over updates of loss, its parts and the gradient norm; token means are over the computed tokens."""
        tokens, lrs, norms, taken = zip(*self._updates, strict=True)
        found = self.tally.result(updates=len(tokens)) | absolute_differences(self._differences)
        square = found.pop("importance_ratio_square", 0.0)
        return {
            **found,
            "ess": effective_sample_share(mean=found.get("importance_ratio_mean", 0.0), mean_square=square),
            "grad_norm": sum(norms) / len(norms),
            "lr": lrs[-1],
            "tokens": float(self.batch.mask_BR.sum()),
            "samples_computed": float(self.active_B.sum()),
            "updates": float(sum(taken)),
            "skipped": float(len(taken) - sum(taken)),
        }


def _loss_options(algorithm: AlgorithmConfig) -> LossOptions:
    return LossOptions(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        clip_dual=algorithm.clip_dual,
        aggregation=algorithm.loss_aggregation,
        loss_scale_factor=algorithm.loss_scale_factor,
        importance_cap=algorithm.importance_cap,
        bypass_loss=algorithm.bypass_loss,
        correction=algorithm.correction,
        tau_positive=algorithm.tau_positive,
        tau_negative=algorithm.tau_negative,
        dro_beta=algorithm.dro_beta,
        clip_cov_share=algorithm.clip_cov_share,
        clip_cov_low=algorithm.clip_cov_low,
        clip_cov_high=algorithm.clip_cov_high,
        kl_cov_share=algorithm.kl_cov_share,
        kl_cov_coef=algorithm.kl_cov_coef,
        kl_loss_coef=algorithm.kl_coef if algorithm.kl_use == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
    )
