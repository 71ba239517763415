"""The optimizer updates of one step, and the figures that they add up.

Losses are divided by counts of the whole batch, so neither the split into micro-batches nor one over ranks changes the
gradient. Dimensions: B samples, R response tokens, N counted response tokens.
"""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trainer.batch import Batch
from trainer.config import AlgorithmConfig, TrainerConfig
from trainer.corrections import effective_sample_share
from trainer.losses import Denominators, LossInputs, LossOptions, learns_without_advantage, loss_of
from trainer.losses.objective import objective
from trainer.metrics import StepMetrics, Tally, absolute_differences
from trainer.optimization import Optimization, Update
from trainer.packing import MicroBatch
from trainer.preparation import Prepared
from trainer.randomness import step_generator
from trainer.scoring import Scorer, cut, put


class Updates:
    """`epochs * minibatches` updates on one prepared batch."""

    def __init__(
        self,
        config: TrainerConfig,
        scorer: Scorer,
        optimization: Optimization,
        prepared: Prepared,
        *,
        step: int,
    ) -> None:
        self._algorithm = config.algorithm
        self._scorer = scorer
        self._optimization = optimization
        self._policy_loss = loss_of(config.algorithm.loss)
        self._options = loss_options(config.algorithm)
        self._generator = step_generator(config.seed, step)
        self._batch = prepared.batch
        self._advantages_BR = prepared.advantages_BR
        self._active_B = _active(config.algorithm, prepared)
        self._old_BR = prepared.old_BR
        self._sampled_BR = prepared.sampled_BR
        self._tally = Tally()
        self._seen: list[tuple[MicroBatch, Tensor]] = []
        """Logprobs of the first pass over the batch."""
        self._fresh_B = torch.zeros(prepared.batch.size, dtype=torch.bool)
        """Samples whose logprobs were seen before an update had moved the weights."""
        self._made: list[Update] = []

    def run(self, *, lr: float) -> None:
        """All updates, at this learning rate."""
        algorithm, size = self._algorithm, self._batch.size
        minibatches = min(algorithm.minibatches, size)
        if self._old_BR is None and algorithm.epochs * minibatches > 1:
            self._old_BR = self._scorer.logprobs(self._batch, self._active_B.nonzero().flatten())
        for epoch in range(algorithm.epochs):
            for rows in np.array_split(np.arange(size), minibatches):
                self._update(torch.from_numpy(rows), lr=lr, first_pass=epoch == 0)

    def _update(self, rows_B: Tensor, *, lr: float, first_pass: bool) -> None:
        """One optimizer update on the samples `rows_B`; all of them count in the denominators."""
        denominators = Denominators.of(self._batch.mask_BR[rows_B])
        if not self._made:
            self._fresh_B[rows_B] = True
        made = self._optimization.update(
            self._batch,
            rows_B,
            lambda micro: self._backward(micro, denominators, first_pass=first_pass),
            computed_B=rows_B[self._active_B[rows_B]],
            lr=lr,
        )
        self._made.append(made)

    def _backward(self, micro: MicroBatch, denominators: Denominators, *, first_pass: bool) -> Tensor:
        scores = self._scorer.policy(micro.tokens, entropy="gradient" if self._algorithm.entropy_coef else "detached")
        if micro.idle:  # the other ranks wait in backward
            torch.autograd.backward(scores.logprobs_N.sum() * 0.0)
            return torch.zeros((), device=self._scorer.device)
        if first_pass:
            self._seen.append((micro, scores.logprobs_N.detach()))
        inputs = self._loss_inputs(micro, scores.logprobs_N, scores.entropy_N, denominators)
        outputs = objective(self._policy_loss, inputs, self._options)
        torch.autograd.backward(outputs.loss * self._scorer.ranks.gradient_scale)
        self._tally.add(outputs.metrics, tokens=float(len(micro.slots_N)))
        return outputs.loss.detach()

    def _loss_inputs(
        self, micro: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor | None, denominators: Denominators
    ) -> LossInputs:
        logprobs_BR = micro.scatter(logprobs_N)
        batch, old_BR = self._batch, self._old_BR
        reference_BR, weights_BR = batch.reference_logprobs_BR, batch.weights_BR
        return LossInputs(
            logprobs_BR=logprobs_BR,
            old_logprobs_BR=logprobs_BR.detach() if old_BR is None else cut(micro, old_BR),
            behaviour_logprobs_BR=cut(micro, batch.behaviour_logprobs_BR),
            advantages_BR=cut(micro, self._advantages_BR),
            mask_BR=cut(micro, batch.mask_BR),
            denominators=denominators,
            reference_logprobs_BR=None if reference_BR is None else cut(micro, reference_BR),
            weights_BR=None if weights_BR is None else cut(micro, weights_BR),
            generator=self._generator,
            entropy_BR=None if entropy_N is None else micro.scatter(entropy_N),
        )

    def differences(self) -> tuple[Tensor, Tensor]:
        """|behaviour - trainer| logprobs under the weights that the step began with: row of the batch and nats, [N]."""
        difference_BR, where_BR = self._compared
        row_N, column_N = (where_BR & self._fresh_B[:, None]).nonzero(as_tuple=True)
        return row_N, difference_BR[row_N, column_N]

    @cached_property
    def _compared(self) -> tuple[Tensor, Tensor]:
        """|behaviour - trainer| logprobs, and where they were compared: [B, R] both.

        The trainer's are the proximal ones, or those of the first pass. Where tokens may be rejected, rejected ones are
        compared too: a server that is far off is judged by them.
        """
        where_BR = (self._batch.mask_BR * self._active_B[:, None]) > 0
        if self._sampled_BR is not None:
            where_BR = self._sampled_BR > 0
        return (self._trainer_logprobs() - self._batch.behaviour_logprobs_BR).abs(), where_BR

    def _trainer_logprobs(self) -> Tensor:
        if self._old_BR is not None and self._algorithm.old_logprobs == "proximal":
            self._fresh_B[:] = True
            return self._old_BR
        seen_BR = torch.zeros_like(self._batch.mask_BR)
        for micro, logprobs_N in self._seen:
            put(seen_BR, micro, logprobs_N)
        self._scorer.ranks.sum_([seen_BR])
        return seen_BR

    def metrics(self) -> StepMetrics:
        """Means over updates of loss, its parts and the gradient norm; token means are over the computed tokens."""
        found = self._tally.result(self._scorer.ranks, updates=len(self._made))
        square = found.pop("importance_ratio_square", 0.0)
        taken = sum(made.taken for made in self._made)
        difference_BR, where_BR = self._compared
        return {
            **found,
            **absolute_differences([difference_BR[where_BR]] if where_BR.any() else []),
            "ess": effective_sample_share(mean=found.get("importance_ratio_mean", 0.0), mean_square=square),
            "grad_norm": sum(made.grad_norm for made in self._made) / len(self._made),
            "tokens": float(self._batch.mask_BR.sum()),
            "samples_computed": float(self._active_B.sum()),
            "updates": float(taken),
            "skipped": float(len(self._made) - taken),
        }


def _active(algorithm: AlgorithmConfig, prepared: Prepared) -> Tensor:
    """Which samples have a gradient that is not exactly zero, [B] bool."""
    batch: Batch = prepared.batch
    counted_B = batch.mask_BR.any(-1)
    if not algorithm.skip_zero_advantage or algorithm.kl_in_loss or algorithm.entropy_coef:
        return counted_B
    if learns_without_advantage(algorithm.loss, loss_of(algorithm.loss)):
        return counted_B
    if algorithm.loss == "bypass" and algorithm.correction.normalize:
        return counted_B
    return counted_B & (prepared.advantages_BR * batch.mask_BR).any(-1)


def loss_options(algorithm: AlgorithmConfig) -> LossOptions:
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
        kl_loss_coef=algorithm.kl_loss_weight,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
    )
