"""The frozen reference policy: logprobs of given responses. B samples, N response tokens."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer.batch import Trajectory, collate
from trainer.model.policy import Policy
from trainer.packing import micro_batch, pack

TokenIds = npt.NDArray[np.int32]


class ReferencePolicy:
    """A model that is never trained; `max_tokens` bounds one forward, in tokens."""

    def __init__(
        self, model: nn.Module, max_tokens: int, *, temperature: float = 1.0, max_logits_mib: int = 256
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._max_tokens = max_tokens
        self._policy = Policy(self._model, temperature=temperature, max_logits_mib=max_logits_mib)

    @torch.inference_mode()
    def logprobs(self, prompts: Sequence[TokenIds], responses: Sequence[TokenIds]) -> list[npt.NDArray[np.float32]]:
        """Nats of each response token given what stands before it, one array per sample in the order given.

        Raises ValueError on an empty prompt or response, or on lists of different length.
        """
        if not prompts and not responses:
            return []
        batch = collate([_unscored(i, p, r) for i, (p, r) in enumerate(zip(prompts, responses, strict=True))])
        device = next(self._model.parameters()).device
        scores: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * len(prompts)
        for rows_B in pack(batch.lengths_B, max_tokens=self._max_tokens)[0]:
            found = self._policy(micro_batch(batch, rows_B, device=device).tokens)
            ends = batch.response_lengths_B[rows_B].cumsum(0)[:-1]
            parts = np.split(found.logprobs_N.float().cpu().numpy(), ends.numpy())
            for row, part in zip(rows_B.tolist(), parts, strict=True):
                scores[row] = part
        return scores


def _unscored(index: int, prompt_ids: TokenIds, response_ids: TokenIds) -> Trajectory:
    return Trajectory(
        sample=str(index),
        group=0,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        behaviour_logprobs=np.zeros(len(response_ids), np.float32),
        reward=0.0,
        spans=((0, len(response_ids)),),
        stop_reason="",
    )
