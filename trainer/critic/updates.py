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
from trainer.guarding.guards import Guards, suspects
from trainer.losses.types import Denominators
from trainer.losses.value import value_loss
from trainer.metrics import StepMetrics, Tally
from trainer.model.layers import compile_layers, recompute_layers
from trainer.model.liger import use_liger
from trainer.model.offload import Offload
from trainer.optimizer import build_optimizer, learning_rate, update
from trainer.packing import MicroBatch
from trainer.parallel.sharding import reshard, shard
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
        self._guards = guards
        self._epochs = config.critic.epochs or config.algorithm.epochs
        self._minibatches = config.critic.minibatches or config.algorithm.minibatches
        offload = config.critic.offload or config.offload
        _prepare(model, config, scorer, offload=offload != "none")
        self.optimizer = build_optimizer(model, config.critic.optimizer)
        self._offload = Offload(model, self.optimizer, offload if scorer.ranks.mesh is None else "none")

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
        tally, taken, size = Tally(), [], prepared.batch.size
        for _ in range(self._epochs):
            for rows in np.array_split(np.arange(size), min(self._minibatches, size)):
                taken.append(self._update(prepared, torch.from_numpy(rows), tally, lr=lr))
        self.position += 1
        self.rest()
        norms = [norm for norm, _ in taken]
        skipped = sum(not was_taken for _, was_taken in taken)
        return {
            **tally.result(self._scorer.ranks, updates=len(taken)),
            **return_metrics(prepared.values_BR, prepared.returns_BR, prepared.batch.mask_BR),
            "critic_grad_norm": sum(norms) / len(norms),
            "critic_lr": lr,
            "critic_updates": float(len(taken) - skipped),
            "critic_skipped": float(skipped),
        }

    def rest(self) -> None:
        """Give the device back what `offload` says, until the next values."""
        self._offload.leave()

    def _update(self, prepared: Prepared, rows_B: Tensor, tally: Tally, *, lr: float) -> tuple[float, bool]:
        """One optimizer update on the samples `rows_B`: its gradient norm, and whether it was taken."""
        mask_BR = prepared.batch.mask_BR[rows_B]
        denominators = Denominators.of(mask_BR)
        loss, parts = torch.zeros((), device=self._scorer.device), []
        for micro in self._scorer.micro_batches(prepared.batch, rows_B[mask_BR.any(-1)]):
            part = self._backward(prepared, micro, denominators, tally)
            loss += part
            parts.append((micro.rows_B, part))
        with self._offload.moments():
            total = self._scorer.ranks.total(loss)
            limit = self.config.optimizer.max_grad_norm
            norm, taken = update(self.optimizer, total, lr=lr, max_grad_norm=limit, ranks=self._scorer.ranks)
        if taken:
            self._guards.taken(of="critic")
        else:
            suspects_B = suspects(parts, size=prepared.batch.size, ranks=self._scorer.ranks)
            self._guards.skipped(loss=total, grad_norm=norm, rows_B=rows_B, suspects_B=suspects_B, of="critic")
        return norm, taken

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


def _prepare(model: ValueModel, config: TrainerConfig, scorer: Scorer, *, offload: bool) -> None:
    if config.liger:
        use_liger(model.body)
    model.train(config.gradient_checkpointing)
    if config.gradient_checkpointing:
        recompute_layers(model.body, share=config.recomputed_share)
    if config.compile:
        compile_layers(model.body)
    if scorer.ranks.mesh is not None:
        shard(model, scorer.ranks.mesh, config.parallel, offload=offload)
