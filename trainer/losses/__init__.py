"""Policy losses by name: one pure function per file, tensors of one micro-batch in, loss and metrics out."""

from functools import cache

from trainer.config import LOSS
from trainer.configs.plugins import load
from trainer.losses.bypass import bypass
from trainer.losses.cispo import cispo
from trainer.losses.clip_cov import clip_cov
from trainer.losses.decoupled import decoupled
from trainer.losses.dppo import dppo_kl, dppo_tv
from trainer.losses.dro import dro
from trainer.losses.geo_mean import geo_mean
from trainer.losses.gpg import gpg
from trainer.losses.gspo import gspo
from trainer.losses.kl_cov import kl_cov
from trainer.losses.ppo import vanilla
from trainer.losses.sapo import sapo
from trainer.losses.types import Denominators, LossInputs, LossOptions, LossOutputs, PolicyLoss

LOSSES: dict[str, PolicyLoss] = {
    "vanilla": vanilla,
    "decoupled": decoupled,
    "gspo": gspo,
    "sapo": sapo,
    "cispo": cispo,
    "gpg": gpg,
    "geo_mean": geo_mean,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "bypass": bypass,
}

LEARNS_WITHOUT_ADVANTAGE = frozenset({"clip_cov", "kl_cov", "dro"})
"""Losses whose gradient depends on samples of zero advantage too: the learner never leaves those out."""


@cache
def loss_of(name: str) -> PolicyLoss:
    """The policy loss of that name, or a user's own; PluginError where it is not there or takes other arguments."""
    return load(name, LOSS, LOSSES, returns=LossOutputs)


def learns_without_advantage(name: str, loss: PolicyLoss) -> bool:
    """Whether samples of zero advantage have a gradient; a user's loss says so by an attribute."""
    return name in LEARNS_WITHOUT_ADVANTAGE or bool(getattr(loss, "learns_without_advantage", False))


__all__ = [
    "LEARNS_WITHOUT_ADVANTAGE",
    "LOSSES",
    "Denominators",
    "LossInputs",
    "LossOptions",
    "LossOutputs",
    "PolicyLoss",
    "learns_without_advantage",
    "loss_of",
]
