"""How weights can reach a rollout server: told by its capabilities, chosen by the trainer, best first."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import protos

WIRE = {
    "nccl": protos.TRANSPORT_NCCL,
    "ipc": protos.TRANSPORT_IPC,
    "gloo": protos.TRANSPORT_GLOO,
    "disk": protos.TRANSPORT_DISK,
}
BROADCASTS = ("nccl", "gloo")
NCCL_VARIABLES = ("NCCL_CUMEM_ENABLE",)
"""Where these differ between two ends, the first broadcast fails with an error that does not say so."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What one end of a push has: a trainer, or a rollout server."""

    transports: frozenset[str]
    gpus: frozenset[str] = frozenset()
    nccl: str = ""
    """Version and settings of its NCCL; both ends must have the same."""
    receivers: int = 1

    def capabilities(self) -> list[str]:
        """As they travel in Identity."""
        words = [f"transport:{transport}" for transport in sorted(self.transports)]
        words += [f"gpu:{gpu}" for gpu in sorted(self.gpus)] + [f"receivers:{self.receivers}"]
        return words + ([f"nccl:{self.nccl}"] if self.nccl else [])


def reach_of(capabilities: Iterable[str]) -> Reach:
    """The inverse of `Reach.capabilities`; words of other kinds are passed over."""
    found: dict[str, list[str]] = {}
    for word in capabilities:
        kind, _, value = word.partition(":")
        found.setdefault(kind, []).append(value)
    return Reach(
        transports=frozenset(found.get("transport", ["gloo", "disk"])),
        gpus=frozenset(found.get("gpu", [])),
        nccl="".join(found.get("nccl", [])),
        receivers=int("".join(found.get("receivers", ["1"]))),
    )


def nccl_of(version: str, environment: dict[str, str] | None = None) -> str:
    """Version and settings that must agree; empty where there is no NCCL."""
    known = os.environ if environment is None else {**os.environ, **environment}
    settings = [f"{name}={known[name]}" for name in NCCL_VARIABLES if name in known]
    return ",".join([version, *settings]) if version else ""


def ladder(wanted: str, trainer: Reach, server: Reach) -> tuple[list[str], str]:
    """Transports to a server, best first, and why NCCL is not among them (empty where it is, or nobody expects it).

    `wanted` other than auto comes first where both ends have it; what follows it is for the case that it fails.
    """
    both = trainer.transports & server.transports
    found, why = [], ""
    if "ipc" in both and trainer.gpus & server.gpus:
        found.append("ipc")
    elif "nccl" in both:  # NCCL refuses two ranks on one card
        if trainer.nccl == server.nccl:
            found.append("nccl")
        else:
            why = f"NCCL differs: {trainer.nccl or 'none'} here, {server.nccl or 'none'} there"
    found += [transport for transport in ("gloo", "disk") if transport in both]
    if wanted in found:
        found = found[found.index(wanted) :]
    elif wanted != "auto":
        why = why or f"{wanted} does not reach it"
    return found, why
