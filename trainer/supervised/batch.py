"""Prompts and responses to learn, as tokens, and their collation into a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trainer.batch import Batch, pad


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt of p and a response of n tokens; ValueError where one has none."""

    key: str
    """Unique among the rows of a run."""
    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
    """With the end token."""

    def __post_init__(self) -> None:
        if not len(self.prompt_ids) or not len(self.response_ids):
            raise ValueError(f"{self.key}: {len(self.prompt_ids)} prompt and {len(self.response_ids)} response tokens")

    @property
    def length(self) -> int:
        """Tokens of both."""
        return len(self.prompt_ids) + len(self.response_ids)


def collate_examples(examples: Sequence[Example]) -> Batch:
    """B examples as one batch in which every response token counts; there is nothing to judge, so rewards are 0."""
    prompts = np.array([len(one.prompt_ids) for one in examples])
    responses = np.array([len(one.response_ids) for one in examples])
    tokens = [part for one in examples for part in (one.prompt_ids, one.response_ids)]
    mask_BR = pad([np.ones(n, np.float32) for n in responses], responses, np.float32)
    return Batch(
        input_ids_BT=pad(tokens, prompts + responses, np.int64),
        prompt_lengths_B=torch.from_numpy(prompts),
        response_lengths_B=torch.from_numpy(responses),
        mask_BR=mask_BR,
        behaviour_logprobs_BR=torch.zeros_like(mask_BR),
        reference_logprobs_BR=None,
        rewards_B=torch.zeros(len(examples)),
        group_B=torch.arange(len(examples)),
    )
