"""Whole weights out of a push that brings their factors: start weight + scaling * b @ a."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protos import Manifest
from protos.buckets import weights_of
from protos.lowrank import add_low_rank
from protos.tensors import TORCH_DTYPES
from rollout.start_weights import StartWeights


class Merged:
    """The weights that a manifest's factors change, made in the same memory push after push.

    Memory on `device`: the sums, as the engine takes them, beside what `StartWeights` holds.
    """

    def __init__(self, manifest: Manifest, start: StartWeights, device: torch.device) -> None:
        self._updates = list(manifest.low_rank)
        self._start = start
        self._device = device
        self._made = {
            spec.name: torch.empty(tuple(spec.shape), dtype=TORCH_DTYPES[spec.dtype], device=device)
            for spec in weights_of(manifest)
        }

    def make(self, factors: Mapping[str, Tensor]) -> None:
        """Compute them; returns when they lie there. ValueError where the start model is another."""
        bases = self._start.bases(self._updates)
        for one in self._updates:
            add_low_rank(self._made[one.name], bases[one.name], factors[one.a], factors[one.b], scaling=one.scaling)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of each, and of what else the model needs to be loaded."""
        return [*self._made.items(), *self._start.others.items()]
