"""What may not go on unseen: updates that are left out, with their samples, and figures that cross a threshold.

One step: `begin`, for each update `taken` or `skipped`, at the end `look`. Its findings are then in `skips`, `alarms`
and `stop_reason`. The policy's updates in a row are counted apart from the critic's. Dimensions: B samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.configs.guards import THRESHOLDS, GuardsConfig
from trainer.metrics import StepMetrics
from trainer.parallel import Ranks

Trained = Literal["policy", "critic"]
NAMED = 16
"""Samples that a sentence names; the step's report has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """An update that was left out."""

    samples: tuple[str, ...]
    """Keys of all samples of the update."""
    suspects: tuple[str, ...]
    """Of these, the ones in micro-batches whose own loss was not finite; none where only the gradient was not."""
    reason: str
    of: Trained = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A figure that has crossed its threshold since the step before."""

    name: str
    """Of the setting."""
    value: float
    threshold: float


class Guards:
    """Watches the steps of one trainer. What must outlive it is in `state`, which checkpoints hold."""

    def __init__(self, config: GuardsConfig) -> None:
        self.config = config
        self.skips: list[Skip] = []
        """Of the newest step."""
        self.alarms: list[Alarm] = []
        """Raised in the newest step; one that stays on is not raised again."""
        self.skips_in_a_row: dict[Trained, int] = {"policy": 0, "critic": 0}
        self._on: set[str] = set()
        self._samples: Sequence[str] = ()

    def begin(self, samples: Sequence[str]) -> None:
        """A step begins, whose rows are these samples."""
        self.skips, self.alarms, self._samples = [], [], samples

    def taken(self, *, of: Trained = "policy") -> None:
        """An update was taken."""
        self.skips_in_a_row[of] = 0

    def skipped(
        self, *, loss: float, grad_norm: float, rows_B: Tensor, suspects_B: Tensor, of: Trained = "policy"
    ) -> None:
        """An update on `rows_B` was left out; the micro-batches of `suspects_B` had no finite loss of their own."""
        self.skips_in_a_row[of] += 1
        reason = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {grad_norm}"
        told = reason if of == "policy" else f"{of}'s {reason}"
        self.skips.append(Skip(samples=self._keys(rows_B), suspects=self._keys(suspects_B), reason=told, of=of))

    def look(self, metrics: Mapping[str, float]) -> StepMetrics:
        """Raises alarms by the step's figures; `alarms` is how many are on. A missing figure changes nothing."""
        for name, metric in THRESHOLDS.items():
            threshold = getattr(self.config, name)
            if threshold is None or metric not in metrics:
                continue
            value = metrics[metric]
            if value >= threshold if name.endswith("_below") else value <= threshold:
                self._on.discard(name)
            elif name not in self._on:  # also where the figure is not a number
                self._on.add(name)
                self.alarms.append(Alarm(name=name, value=value, threshold=threshold))
        return {"alarms": float(len(self._on))}

    @property
    def stop_reason(self) -> str:
        """Why the run may not go on; empty where it may."""
        limit = self.config.max_skips_in_a_row
        for last in reversed(self.skips):
            count = self.skips_in_a_row[last.of]
            if limit and count >= limit:
                return (
                    f"{count} updates in a row were left out (trainer.guards.max_skips_in_a_row={limit}): of the last"
                    f" one the {last.reason}, {named(last)}"
                )
        if self.config.stop_on_alarm and self._on:
            told = ", ".join(f"{name}={getattr(self.config, name):g}" for name in sorted(self._on))
            return f"a figure is out of bounds and trainer.guards.stop_on_alarm is set: {told}"
        return ""

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {
            "skips_in_a_row": self.skips_in_a_row["policy"],
            "critic_skips_in_a_row": self.skips_in_a_row["critic"],
            "alarms_on": sorted(self._on),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stood; an empty one is a fresh start."""
        self.skips_in_a_row = {
            "policy": int(state.get("skips_in_a_row", 0)),
            "critic": int(state.get("critic_skips_in_a_row", 0)),
        }
        self._on = set(state.get("alarms_on", ()))

    def _keys(self, rows_B: Tensor) -> tuple[str, ...]:
        return tuple(self._samples[row] for row in rows_B.tolist())


def suspects(parts: Sequence[tuple[Tensor, Tensor]], *, size: int, ranks: Ranks) -> Tensor:
    """Rows of micro-batches whose own loss is not finite, on any rank. parts: rows and loss of this rank's own."""
    bad_B = torch.zeros(size)
    for rows_B, loss in parts:
        bad_B[rows_B] += float(not loss.isfinite())
    ranks.sum_([bad_B])
    return bad_B.nonzero().flatten()


def named(skip: Skip) -> str:
    """The samples of an update in words, the suspects where there are any."""
    keys = list(dict.fromkeys(skip.suspects or skip.samples))
    rest = f" and {len(keys) - NAMED} more, see events.jsonl" if len(keys) > NAMED else ""
    return f"{'in the micro-batches of' if skip.suspects else 'of'} samples {', '.join(keys[:NAMED])}{rest}"
