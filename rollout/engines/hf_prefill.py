"""Prefill: whole sequences through the model, their keys and values into the slots.

Sequences are padded on the right, so no mask is needed: with causal attention no real token sees the padding, and what
the padding leaves in a slot is overwritten before attention reaches it.

Shapes: P sequences, L longest of a pass, U distinct lengths of a pass, B slots to fill, V vocabulary.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.engines.hf_cache import SlotCache

# The model gives logits at every distinct last position of a pass for all its sequences; this bounds P * U * V.
MAX_LOGITS = 1 << 27


class Prefill:
    """Fills slots of a cache, in passes of at most `max_tokens` (padding included) or of a single sequence."""

    def __init__(self, model: PreTrainedModel, *, cache: SlotCache, max_tokens: int) -> None:
        self._model, self._cache, self._max_tokens = model, cache, max_tokens
        self._device = next(model.parameters()).device
        self._vocab_size: int = model.get_input_embeddings().num_embeddings

    def run(self, sequences: list[npt.NDArray[np.int64]], *, source_B: npt.NDArray[np.int64], first: int) -> Tensor:
        """Give slot first + i the states of sequence source_B[i]; return the logits after each sequence, (P, V)."""
        lengths_P = np.array([len(sequence) for sequence in sequences])
        self._cache.reserve(first + len(source_B), length=int(lengths_P.max()))
        order_P = np.argsort(lengths_P, kind="stable")
        logits = []
        for chunk in self._chunks(order_P, lengths_P=lengths_P):
            logits.append(self._pass([sequences[at] for at in chunk]))
            self._store(chunk, source_B=source_B, first=first)
        logits_PV = torch.cat(logits)
        return logits_PV[torch.from_numpy(np.argsort(order_P, kind="stable")).to(self._device)]

    def _chunks(
        self, order_P: npt.NDArray[np.int64], *, lengths_P: npt.NDArray[np.int64]
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Cut the sequences, ascending in length, into passes."""
        ascending = lengths_P[order_P]
        rank = np.cumsum(np.diff(ascending, prepend=ascending[0]) > 0)
        begin = 0
        for end in range(1, len(order_P) + 1):
            if end < len(order_P):
                count = end + 1 - begin
                num_logits = count * int(rank[end] - rank[begin] + 1) * self._vocab_size
                if count * ascending[end] <= self._max_tokens and num_logits <= MAX_LOGITS:
                    continue
            yield order_P[begin:end]
            begin = end

    def _pass(self, sequences: list[npt.NDArray[np.int64]]) -> Tensor:
        lengths = np.array([len(sequence) for sequence in sequences])
        ids_PL = np.zeros((len(sequences), lengths.max()), dtype=np.int64)
        for place, sequence in enumerate(sequences):
            ids_PL[place, : len(sequence)] = sequence
        last_U, which_P = np.unique(lengths - 1, return_inverse=True)
        self._cache.begin_prefill()
        output = self._model(
            input_ids=torch.from_numpy(ids_PL).to(self._device),
            position_ids=torch.arange(ids_PL.shape[1], device=self._device)[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.from_numpy(last_U).to(self._device),
        )
        logits: Tensor = output.logits[torch.arange(len(sequences)), torch.from_numpy(which_P)]
        return logits

    def _store(self, chunk: npt.NDArray[np.int64], *, source_B: npt.NDArray[np.int64], first: int) -> None:
        place = np.full(int(source_B.max()) + 1, -1, dtype=np.int64)
        place[chunk] = np.arange(len(chunk))
        place_B = place[source_B]
        filled = np.flatnonzero(place_B >= 0)
        self._cache.store(
            torch.from_numpy(filled + first).to(self._device),
            source_B=torch.from_numpy(place_B[filled]).to(self._device),
        )
