"""Save, verify, resume: a checkpoint is a folder `step_N` that also loads as a Hugging Face model.

    snapshot(learner)  ->  CheckpointStore.write      ->  step_N.tmp-<incarnation>/  -> rename ->  step_N/  <- latest
    copies tensors         slow, on any thread            files, fsync, manifest last

`step_N/` holds model.safetensors, optimizer.safetensors, state.json, the model's config and tokenizer files, and
manifest.json. There is no pickle in it. With trainer.lora it is small: the adapter instead of the model, as PEFT has
it, and in state.json what it belongs to.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer import durable
from trainer.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config, saved_adapter
from trainer.config import CheckpointConfig, TrainerConfig
from trainer.lora import located
from trainer.model import CONFIG_FILES, model_files, model_folder
from trainer.randomness import random_states, set_random_states
from trainer.step import Learner

logger = logging.getLogger(__name__)

FORMAT = 1
LATEST = "latest"
_STEP = re.compile(r"step_(\d{1,18})")
_LEFTOVER = re.compile(r".+\.tmp-[A-Za-z0-9-]+")


class CheckpointFailed(Exception):
    """A checkpoint was not written or does not fit; earlier ones are as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A moment of training, on the CPU, shared with nothing."""

    step: int
    weights_file: str
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """By parameter name and state name, `layer.weight/exp_avg`."""
    state: dict[str, Any]
    """The content of state.json."""
    files: tuple[Path, ...]
    """Config and tokenizer files to copy."""
    texts: dict[str, str]
    """Further files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a checkpoint says beside weights and moments."""

    step: int
    policy_version: int
    extra: dict[str, Any]
    config_changed: bool
    """The config differs from that of the run that saved."""


def snapshot(learner: Learner, *, step: int, policy_version: int, extra: dict[str, Any] | None = None) -> Snapshot:
    """Copies weights, moments and generator states; `extra` must be JSON and is given back by `restore`."""
    state = {
        "step": step,
        "policy_version": policy_version,
        "schedule_position": learner.schedule_position,
        "kl_coef": learner.kl_coef,
        "random": random_states(),
        "config_hash": config_hash(learner.config),
        "base": _base(learner),
        "extra": json.loads(json.dumps(extra or {})),
    }
    files = model_files(model_folder(learner.config.model))
    with_adapter = learner.config.lora is not None
    return Snapshot(
        step=step,
        weights_file=_weights_file(learner),
        model={name: _copy(tensor) for name, tensor in _weights(learner).items()},
        optimizer={name: _copy(tensor) for name, tensor in _moments(learner).items()},
        state=state,
        files=tuple(file for file in files if not (with_adapter and file.name in CONFIG_FILES)),
        texts={ADAPTER_CONFIG: adapter_config(learner.model)} if with_adapter else {},
    )


def restore(folder: Path, learner: Learner) -> Restored:
    """Puts a verified checkpoint into `learner` and the global generators, bit for bit.

    Raises CheckpointFailed, with `learner` untouched, when its tensors are not those of the learner's model.
    """
    state = json.loads(durable.read_bytes(folder / "state.json"))
    _check_kind(folder, state.get("base"), learner)
    weights, moments = load_file(folder / _weights_file(learner)), load_file(folder / "optimizer.safetensors")
    targets = _weights(learner)
    _check_fit(folder, weights, targets)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(weights[name])
    _set_moments(learner, moments)
    learner.schedule_position = state["schedule_position"]
    if learner.config.algorithm.kl_target is not None:
        learner.kl_coef = state.get("kl_coef", learner.kl_coef)
    set_random_states(state["random"])
    changed = state["config_hash"] != config_hash(learner.config)
    if changed:
        logger.warning("the trainer config differs from the one that wrote the checkpoint", extra={"path": str(folder)})
    return Restored(
        step=state["step"], policy_version=state["policy_version"], extra=state["extra"], config_changed=changed
    )


def config_hash(config: TrainerConfig) -> str:
    """sha256 of the config as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


class CheckpointStore:
    """The checkpoints of one run. `write` may run on another thread than training, one at a time."""

    def __init__(self, folder: Path, config: CheckpointConfig, *, incarnation: int) -> None:
        """Makes the folder and removes what an earlier life left half-written; raises CheckpointFailed on OSError."""
        self._folder = folder
        self._config = config
        self._suffix = f".tmp-{incarnation}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for entry in os.listdir(folder):
                if _LEFTOVER.fullmatch(entry):
                    _remove(folder / entry)
        except OSError as error:
            raise CheckpointFailed(f"cannot use the checkpoint folder {folder}: {error}") from error

    def write(self, taken: Snapshot) -> Path:
        """Writes `step_N` and moves `latest` to it, then prunes; replaces a `step_N` that is there.

        Raises CheckpointFailed (disk full, no permission, folder gone) with nothing half-written left behind.
        """
        target = self._folder / f"step_{taken.step}"
        fresh = target.with_name(target.name + self._suffix)
        try:
            _remove(fresh)
            _fill(fresh, taken)
            self._publish(fresh, target)
            self._prune(newest=taken.step)
        except (OSError, RuntimeError, SafetensorError) as error:
            self._discard(target)
            raise CheckpointFailed(f"checkpoint {target} was not written: {error}") from error
        return target

    def _publish(self, fresh: Path, target: Path) -> None:
        aside = self._aside(target)
        if os.path.lexists(target):
            _remove(aside)
            os.rename(target, aside)
        os.rename(fresh, target)
        durable.sync(self._folder)
        durable.replace_text(self._folder / LATEST, target.name, suffix=self._suffix)
        _remove(aside)

    def _aside(self, target: Path) -> Path:
        return target.with_name(f"{target.name}-old{self._suffix}")

    def _discard(self, target: Path) -> None:
        """After a failed write: puts back what stood at `target` and removes what was half-written."""
        aside = self._aside(target)
        with contextlib.suppress(OSError):
            if not os.path.lexists(target) and os.path.lexists(aside):
                os.rename(aside, target)
        with contextlib.suppress(OSError):
            (self._folder / f"{LATEST}{self._suffix}").unlink(missing_ok=True)
        for folder in (aside, target.with_name(target.name + self._suffix)):
            shutil.rmtree(folder, ignore_errors=True)

    def latest_verified(self) -> tuple[Path | None, list[str]]:
        """The newest whole checkpoint, and a sentence on each file that made a newer one unusable.

        Begins at the one that `latest` names and goes back in time; only then tries those after it, which stem from a
        crash between rename and pointer or from a line of training that was given up. Problems are logged as errors.
        """
        steps, told = self._steps(), []
        try:
            pointed = _STEP.fullmatch(durable.read_bytes(self._folder / LATEST).decode("ascii", "replace"))
        except OSError as error:
            pointed = None
            if steps:
                told.append(f"{self._folder / LATEST}: {error.strerror}")
        if pointed and int(pointed[1]) not in steps:
            told.append(f"{self._folder / pointed[0]} is missing, and {LATEST} names it")
        newest = int(pointed[1]) if pointed else max(steps, default=0)
        for step in sorted(steps, key=lambda step: (step > newest, -step)):
            found = durable.problems(self._folder / f"step_{step}")
            if not found:
                return self._folder / f"step_{step}", _tell(told)
            told.extend(found)
        return None, _tell(told)

    def oldest(self) -> int:
        """Step of the oldest checkpoint that is kept; 0 where there is none."""
        return min(self._steps(), default=0)

    def _steps(self) -> list[int]:
        names = (_STEP.fullmatch(name) for name in os.listdir(self._folder))
        return sorted(int(match[1]) for match in names if match)

    def _prune(self, *, newest: int) -> None:
        """Removes what the config does not keep of the steps before `newest`, which was just written."""
        past = [step for step in self._steps() if step < newest]
        every = self._config.keep_every
        for step in past[: max(0, len(past) - self._config.keep_last + 1)]:
            if not (every and step % every == 0):
                shutil.rmtree(self._folder / f"step_{step}", ignore_errors=True)


def _fill(folder: Path, taken: Snapshot) -> None:
    folder.mkdir(mode=0o700)
    save_file(taken.model, folder / taken.weights_file, metadata={"format": "pt"})
    save_file(taken.optimizer, folder / "optimizer.safetensors")
    durable.write_bytes(folder / "state.json", json.dumps(taken.state).encode())
    for name, text in taken.texts.items():
        durable.write_bytes(folder / durable.checked_name(name), text.encode())
    for file in taken.files:
        durable.write_bytes(folder / durable.checked_name(file.name), file.read_bytes())
    durable.seal(folder, {"format": FORMAT, "step": taken.step})


def _weights_file(learner: Learner) -> str:
    return "model.safetensors" if learner.config.lora is None else ADAPTER_WEIGHTS


def _base(learner: Learner) -> dict[str, Any] | None:
    """What the adapter of a LoRA run belongs to."""
    config = learner.config
    if config.lora is None:
        return None
    fingerprint = str(learner.model.fingerprint_of_base)
    return {"model": located(config.model), "dtype": config.dtype, "fingerprint": fingerprint}


def _weights(learner: Learner) -> dict[str, Tensor]:
    """Parameters and saved buffers by name; a tied parameter stands once, as transformers saves it. LoRA: A and B."""
    if learner.config.lora is not None:
        return saved_adapter(learner.model)
    saved = learner.model.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = {**dict(learner.model.named_parameters()), **dict(learner.model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name in saved}


def _moments(learner: Learner) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for parameter, states in learner.optimizer.state.items()
        for key, value in states.items()
    }


def _set_moments(learner: Learner, moments: dict[str, Tensor]) -> None:
    by_name: dict[str, dict[str, Tensor]] = {}
    for full_name, value in moments.items():
        name, key = full_name.rsplit("/", 1)
        by_name.setdefault(name, {})[key] = value
    learner.optimizer.state.clear()
    for name, parameter in learner.model.named_parameters():
        if name in by_name:
            states = by_name[name].items()
            learner.optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in states}


def _check_kind(folder: Path, base: dict[str, Any] | None, learner: Learner) -> None:
    """A whole model fits a whole one only, and an adapter the base that it was trained on."""
    own = _base(learner)
    if (base is None) != (own is None):
        wanted = "holds a whole model, and trainer.lora is set" if base is None else "needs trainer.lora"
        raise CheckpointFailed(f"{folder} {wanted}")
    if base and own and base["fingerprint"] != own["fingerprint"]:
        raise CheckpointFailed(f"{folder} belongs to {base['model']} in {base['dtype']}; {own['model']} differs")


def _check_fit(folder: Path, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    if found.keys() != wanted.keys():
        names = ", ".join(sorted(found.keys() ^ wanted.keys())[:3])
        raise CheckpointFailed(f"{folder} is of another model: it differs in {names}")
    for name, tensor in wanted.items():
        if (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype):
            said = f"{tuple(found[name].shape)} {found[name].dtype}"
            raise CheckpointFailed(f"{folder}: {name} is {said}, the model has {tuple(tensor.shape)} {tensor.dtype}")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _remove(path: Path) -> None:
    """Removes a file, a link (not what it points to) or a folder; nothing when it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _tell(problems: list[str]) -> list[str]:
    for problem in problems:
        logger.error("checkpoint problem: %s", problem)
    return problems
