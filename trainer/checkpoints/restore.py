"""A checkpoint back into a learner, whatever number of ranks has written it."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import durable
from trainer.checkpoints.blocks import DTYPES, Stored, stored
from trainer.checkpoints.dcp_reader import load_shards
from trainer.checkpoints.failure import CheckpointFailed
from trainer.checkpoints.snapshot import base_of, config_hash
from trainer.checkpoints.trained import Trained, trained_models
from trainer.randomness import set_random_states
from trainer.step import Learner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a checkpoint says beside weights and moments."""

    step: int
    policy_version: int
    extra: dict[str, Any]
    config_changed: bool
    """The config differs from that of the run that saved."""


def restore(folder: Path, learner: Learner) -> Restored:
    """Puts a verified checkpoint into `learner` and the global generators, bit for bit. No exchange with other ranks.

    Raises CheckpointFailed, with `learner` untouched, when its tensors are not those of the learner's models.
    """
    state = json.loads(durable.read_bytes(folder / "state.json"))
    _check_kind(folder, state.get("base"), learner)
    fitting = [(trained, _check_fit(folder, trained)) for trained in trained_models(learner)]
    for trained, places in fitting:
        load_shards(folder, trained.weights_part, trained.weights())
        load_shards(folder, trained.moments_part, places)
        trained.set_moments(places)
    learner.schedule_position = state["schedule_position"]
    if learner.critic is not None:
        learner.critic.position = state["critic_position"]
    if learner.config.algorithm.kl_target is not None:
        learner.kl_coef = state.get("kl_coef", learner.kl_coef)
    set_random_states(state["random"])
    changed = state["config_hash"] != config_hash(learner.config)
    if changed:
        logger.warning("the trainer config differs from the one that wrote the checkpoint", extra={"path": str(folder)})
    return Restored(
        step=state["step"], policy_version=state["policy_version"], extra=state["extra"], config_changed=changed
    )


def _check_kind(folder: Path, base: dict[str, Any] | None, learner: Learner) -> None:
    """A whole model fits a whole one only, and an adapter the base that it was trained on."""
    own = base_of(learner)
    if (base is None) != (own is None):
        wanted = "holds a whole model, and trainer.lora is set" if base is None else "needs trainer.lora"
        raise CheckpointFailed(f"{folder} {wanted}")
    if base and own and base["fingerprint"] != own["fingerprint"]:
        raise CheckpointFailed(f"{folder} belongs to {base['model']} in {base['dtype']}; {own['model']} differs")


def _check_fit(folder: Path, trained: Trained) -> dict[str, Tensor]:
    """That the weights and moments are of these models; gives empty places for the moments."""
    _check_weights(folder, stored(folder, trained.weights_part), trained.weights())
    parameters, places = dict(trained.model.named_parameters()), {}
    for name, found in stored(folder, trained.moments_part).items():
        parameter = parameters.get(name.rpartition("/")[0])
        if parameter is None or found.whole not in ((), (*parameter.shape,)):
            raise CheckpointFailed(f"{folder} is of another model: its {name} is {found.whole}")
        dtype = DTYPES[found.dtype]
        if found.whole:
            places[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            places[name] = torch.zeros((), dtype=dtype, device=parameter.device)
    return places


def _check_weights(folder: Path, found: Mapping[str, Stored], wanted: Mapping[str, Tensor]) -> None:
    if found.keys() != wanted.keys():
        names = ", ".join(sorted(found.keys() ^ wanted.keys())[:3])
        raise CheckpointFailed(f"{folder} is of another model: it differs in {names}")
    for name, tensor in wanted.items():
        whole, dtype = found[name].whole, DTYPES[found[name].dtype]
        if (whole, dtype) != ((*tensor.shape,), tensor.dtype):
            raise CheckpointFailed(
                f"{folder}: {name} is {whole} {dtype}, the model has {(*tensor.shape,)} {tensor.dtype}"
            )
