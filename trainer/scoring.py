"""Scores of a whole batch under the present weights. B samples, R response tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.batch import Batch
from trainer.model.policy import Policy
from trainer.packing import MicroBatch, micro_batch, pack
from trainer.parallel import Ranks
from trainer.parallel.sharding import reshard


class Scorer:
    """Runs a policy over batches; every rank its own part, and each has the whole result."""

    def __init__(self, policy: Policy, *, max_tokens: int, device: torch.device, ranks: Ranks) -> None:
        self.policy = policy
        self.device = device
        self.ranks = ranks
        self._max_tokens = max_tokens

    def micro_batches(self, batch: Batch, rows_B: Tensor) -> Iterator[MicroBatch]:
        """This rank's part of the rows; each rank gets equally many micro-batches."""
        parts = pack(batch.lengths_B[rows_B], max_tokens=self._max_tokens, ranks=self.ranks.size)
        for part in parts[self.ranks.rank]:
            yield micro_batch(batch, rows_B[part], device=self.device)

    def logprobs(self, batch: Batch, rows_B: Tensor) -> Tensor:
        """Of these rows' counted tokens, [B, R] on the CPU, zero elsewhere."""
        return self.scores(batch, rows_B)[0]

    @torch.no_grad()
    def scores(self, batch: Batch, rows_B: Tensor, *, square_sums: bool = False) -> tuple[Tensor, Tensor]:
        """Logprobs, and sums of squared probabilities where they are asked for; [B, R] on the CPU, zero elsewhere."""
        logprobs_BR, squares_BR = torch.zeros_like(batch.mask_BR), torch.zeros_like(batch.mask_BR)
        for micro in self.micro_batches(batch, rows_B):
            found = self.policy(micro.tokens, square_sums=square_sums)
            put(logprobs_BR, micro, found.logprobs_N)
            if found.square_sums_N is not None:
                put(squares_BR, micro, found.square_sums_N)
        reshard(self.policy)
        self.ranks.sum_([logprobs_BR, squares_BR] if square_sums else [logprobs_BR])
        return logprobs_BR, squares_BR


def put(values_BR: Tensor, micro: MicroBatch, values_N: Tensor) -> None:
    """Writes a micro-batch's values of counted tokens to their places in the batch."""
    if not micro.idle:
        values_BR[micro.rows_B, : micro.width] = micro.scatter(values_N).to(values_BR)


def cut(micro: MicroBatch, values_BR: Tensor) -> Tensor:
    """A micro-batch's part of values of the whole batch, on its device."""
    return values_BR[micro.rows_B, : micro.width].to(micro.slots_N.device, non_blocking=True)
