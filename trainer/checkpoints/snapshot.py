"""A moment of training, copied to host memory: what is written from it may take its time."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.adapters.files import ADAPTER_CONFIG, adapter_config
from trainer.adapters.lora import located
from trainer.checkpoints.shards import Shard, own_shards
from trainer.checkpoints.trained import parts_of
from trainer.config import TrainerConfig
from trainer.model.load import CONFIG_FILES, model_files, model_folder
from trainer.randomness import random_states
from trainer.step import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One rank's share of a checkpoint, shared with nothing."""

    step: int
    parts: dict[str, dict[str, Shard]]
    """Of the model, the optimizer and so on; the same parts on each rank."""
    state: dict[str, Any]
    """The content of state.json."""
    files: tuple[Path, ...]
    """Config and tokenizer files to copy."""
    texts: dict[str, str]
    """Further files."""


def snapshot(learner: Learner, *, step: int, policy_version: int, extra: dict[str, Any] | None = None) -> Snapshot:
    """Copies weights, moments and generator states; `extra` must be JSON and is given back by `restore`.

    On several ranks each copies its own shards, without an exchange. The generators are those of rank 0: what a step
    draws comes from its number, and is the same on all.
    """
    files = model_files(model_folder(learner.config.model))
    with_adapter = learner.config.lora is not None
    leads = learner.ranks.leads
    return Snapshot(
        step=step,
        parts={part: own_shards(tensors, leads=leads) for part, tensors in parts_of(learner).items()},
        state={
            "step": step,
            "policy_version": policy_version,
            "ranks": learner.ranks.size,
            "schedule_position": learner.schedule_position,
            "critic_position": None if learner.critic is None else learner.critic.position,
            "kl_coef": learner.kl_coef,
            "random": random_states(),
            "config_hash": config_hash(learner.config),
            "base": base_of(learner),
            "extra": json.loads(json.dumps(extra or {})),
        },
        files=tuple(file for file in files if not (with_adapter and file.name in CONFIG_FILES)),
        texts={ADAPTER_CONFIG: adapter_config(learner.model)} if with_adapter else {},
    )


def base_of(learner: Learner) -> dict[str, Any] | None:
    """What the adapter of a LoRA run belongs to."""
    config = learner.config
    if config.lora is None:
        return None
    fingerprint = learner.model.fingerprint_of_base
    return {"model": located(config.model), "dtype": config.dtype, "fingerprint": fingerprint}


def config_hash(config: TrainerConfig) -> str:
    """sha256 of the config as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
