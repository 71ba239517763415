"""What is measured side by side: `ours` and `bare`, each with options behind a plus sign."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.bench.bare.job import BARE

OPTIONS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "ours": {
        "compile": ("trainer.compile=true",),
        "liger": ("trainer.liger=true",),
        "replicated": ("trainer.parallel.replicas=0",),
        "half": ("trainer.recomputed_share=0.5",),
        "proximal": (
            "trainer.algorithm.old_logprobs=proximal",
            "trainer.algorithm.correction.weights=token",
        ),
    },
    "bare": {"compile": (), "cudnn": ()},
}
"""kind -> option -> settings of the trainer that it stands for; options of the bare loop are its own."""
MODULES = {"ours": ("services.bench", "learner"), "bare": (BARE, "fsdp")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One loop with its options."""

    name: str
    kind: str
    options: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        return [setting for option in self.options for setting in OPTIONS[self.kind][option]]


def row_of(name: str) -> Row:
    """`ours+proximal` and the like; ValueError that names what there is."""
    kind, *options = name.split("+")
    if kind not in OPTIONS:
        raise ValueError(f"row {name!r}: there are {', '.join(OPTIONS)}")
    if unknown := [option for option in options if option not in OPTIONS[kind]]:
        raise ValueError(f"row {name!r}: {kind} has no {unknown[0]!r}, only {', '.join(OPTIONS[kind])}")
    return Row(name=name, kind=kind, options=tuple(options))
