"""Supervised training (SFT) with the trainer's own core: the same policy, ranks, optimizer, guards and checkpoints.

rows -> micro-batches without padding -> forward, loss, backward -> clip -> AdamW. The loss is the mean of -logprob over
the response tokens of the whole batch, whatever micro-batches and ranks it is split into. B samples, N response tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.metrics import StepMetrics
from trainer.optimizer import learning_rate
from trainer.packing import MicroBatch
from trainer.parallel.sharding import reshard
from trainer.step import Learner
from trainer.supervised.batch import Example, collate_examples

JUDGED_AT_ONCE = 256
"""Held-out rows that are collated together."""


class SupervisedLearner(Learner):
    """A learner that is told what to answer."""

    def learn(self, examples: Sequence[Example]) -> StepMetrics:
        """One optimizer update on these rows, and its figures; every rank is given the same rows.

        An update whose loss or gradient norm is not finite is left out and counted in `skipped`.
        """
        self._offload.bring_weights()
        self.guards.begin([one.key for one in examples])
        batch, lr = collate_examples(examples), learning_rate(self.schedule_position, self.config.optimizer)
        rows_B, tokens = torch.arange(batch.size), float(batch.mask_BR.sum())
        made = self._optimization.update(
            batch, rows_B, lambda micro: self._backward(micro, tokens), computed_B=rows_B, lr=lr
        )
        self.schedule_position += 1
        metrics = {
            "loss": made.loss,
            "lr": lr,
            "grad_norm": made.grad_norm,
            "samples": float(batch.size),
            "tokens": float(batch.lengths_B.sum()),
            "response_tokens": tokens,
            "skipped": float(not made.taken),
        }
        return metrics | self.guards.look(metrics)

    def _backward(self, micro: MicroBatch, tokens: float) -> Tensor:
        """This micro-batch's part of the loss; without rows 0, for the other ranks wait in backward."""
        loss = -self.policy(micro.tokens).logprobs_N.sum() / tokens
        torch.autograd.backward(loss * self.ranks.gradient_scale)
        return loss.detach()

    @torch.no_grad()
    def judge(self, examples: Sequence[Example]) -> StepMetrics:
        """Mean of -logprob, and share of tokens that greedy decoding would take given those before them, over the
        response tokens of rows that are not trained on."""
        self._offload.bring_weights()
        sums, tokens = torch.zeros(2, dtype=torch.float64), 0.0
        for first in range(0, len(examples), JUDGED_AT_ONCE):
            batch = collate_examples(examples[first : first + JUDGED_AT_ONCE])
            tokens += float(batch.mask_BR.sum())
            for micro in self._scorer.micro_batches(batch, torch.arange(batch.size)):
                found = self.policy(micro.tokens, best=True)
                sums += torch.stack([-found.logprobs_N.double().sum(), found.best_N.double().sum()]).cpu()
        reshard(self.policy)
        self.ranks.sum_([sums])
        loss, hits = (sums / tokens).tolist()
        return {"held_out_loss": loss, "held_out_token_accuracy": hits}
