"""What a step does with its critic: values of the whole batch before the updates, then the critic's own updates.

    values -> (advantages and returns, trainer/preparation.py) -> [ micro-batches -> value loss, backward ] -> AdamW

Losses are divided by counts of the whole batch, as the policy's are. Dimensions: B samples, R response tokens.
"""

import numpy as np
import torch
from torch import Tensor

from trainer.advantages.moments import masked_mean
from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.configs.critic import CriticConfig
from trainer.critic.model import ValueModel
from trainer.guarding.guards import Guards
from trainer.losses.types import Denominators
from trainer.losses.value import value_loss
from trainer.metrics import StepMetrics, Tally
from trainer.model.offload import Offload
from trainer.model.ready import make_ready
from trainer.optimization import Optimization, Update
from trainer.optimizer import build_optimizer, learning_rate
from trainer.packing import MicroBatch
from trainer.parallel.sharding import reshard
from trainer.preparation import Prepared
from trainer.scoring import Scorer, cut, put


class Critic:
    """Holds the value model, its optimizer and its place in a schedule of its own."""

    def __init__(self, model: ValueModel, config: TrainerConfig, scorer: Scorer, guards: Guards) -> None:
        """Recomputes, compiles and shards the layers as the policy's are; `scorer` and `guards` are the policy's."""
        assert config.critic is not None
        self.model = model
        self.config: CriticConfig = config.critic
        self.position = 0
        """Training steps so far."""
        self._scorer = scorer
        self._epochs = config.critic.epochs or config.algorithm.epochs
        self._minibatches = config.critic.minibatches or config.algorithm.minibatches
        offload = config.critic.offload or config.offload
        make_ready(model, model.body, config, scorer.ranks, offload=offload != "none")
        self.optimizer = build_optimizer(model, config.critic.optimizer)
        self._offload = Offload(model, self.optimizer, offload if scorer.ranks.mesh is None else "none")
        limit = config.critic.optimizer.max_grad_norm
        self._optimization = Optimization(
            scorer, self.optimizer, self._offload, guards, max_grad_norm=limit, of="critic"
        )

    @property
    def warms_up(self) -> bool:
        """Whether the policy is to wait in this step."""
        return self.position < self.config.warmup_steps

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """Under the present weights, of counted tokens, [B, R] on the CPU, zero elsewhere."""
        self._offload.bring_weights()
        values_BR = torch.zeros_like(batch.mask_BR)
        for micro in self._scorer.micro_batches(batch, torch.arange(batch.size)):
            put(values_BR, micro, self.model(micro.tokens))
        reshard(self.model)
        self._scorer.ranks.sum_([values_BR])
        return values_BR

    def train(self, prepared: Prepared) -> StepMetrics:
        """All updates of a step, after which the device has back what `offload` says; the step's figures."""
        assert prepared.values_BR is not None
        lr = learning_rate(self.position, self.config.optimizer)
        tally, made, size = Tally(), [], prepared.batch.size
        for _ in range(self._epochs):
            for rows in np.array_split(np.arange(size), min(self._minibatches, size)):
                made.append(self._update(prepared, torch.from_numpy(rows), tally, lr=lr))
        self.position += 1
        self.rest()
        skipped = sum(not one.taken for one in made)
        return {
            **tally.result(self._scorer.ranks, updates=len(made)),
            **return_metrics(prepared.values_BR, prepared.returns_BR, prepared.batch.mask_BR),
            "critic_grad_norm": sum(one.grad_norm for one in made) / len(made),
            "critic_lr": lr,
            "critic_updates": float(len(made) - skipped),
            "critic_skipped": float(skipped),
        }

    def rest(self) -> None:
        """Give the device back what `offload` says, until the next values."""
        self._offload.leave()

    def _update(self, prepared: Prepared, rows_B: Tensor, tally: Tally, *, lr: float) -> Update:
        """One optimizer update on the samples `rows_B`."""
        mask_BR = prepared.batch.mask_BR[rows_B]
        denominators = Denominators.of(mask_BR)
        return self._optimization.update(
            prepared.batch,
            rows_B,
            lambda micro: self._backward(prepared, micro, denominators, tally),
            computed_B=rows_B[mask_BR.any(-1)],
            lr=lr,
        )

    def _backward(self, prepared: Prepared, micro: MicroBatch, denominators: Denominators, tally: Tally) -> Tensor:
        assert prepared.values_BR is not None
        values_N = self.model(micro.tokens)
        if micro.idle:  # the other ranks wait in backward
            torch.autograd.backward(values_N.sum() * 0.0)
            return torch.zeros((), device=self._scorer.device)
        outputs = value_loss(
            micro.scatter(values_N),
            cut(micro, prepared.values_BR),
            cut(micro, prepared.returns_BR),
            cut(micro, prepared.batch.mask_BR),
            clip=self.config.cliprange_value,
            aggregation=self.config.loss_aggregation,
            denominators=denominators,
            scale_factor=self.config.loss_scale_factor,
        )
        loss = self.config.vf_coef * outputs.loss
        torch.autograd.backward(loss * self._scorer.ranks.gradient_scale)
        tally.add(outputs.metrics, tokens=float(len(micro.slots_N)))
        return loss.detach()


def return_metrics(values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor) -> StepMetrics:
    """Mean of the returns, and the share of their variance that the values explain; the latter where there is any."""
    mean = masked_mean(returns_BR, mask_BR)
    variance = masked_mean((returns_BR - mean).square(), mask_BR)
    told = {"return_mean": float(mean)}
    if variance <= 0:
        return told
    error_BR = returns_BR - values_BR
    left = masked_mean((error_BR - masked_mean(error_BR, mask_BR)).square(), mask_BR)
    return {**told, "explained_variance": 1.0 - float(left / variance)}
