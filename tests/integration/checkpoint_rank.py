"""One rank of a learner that saves and resumes, started by torchrun; told by one JSON argument.

resume: trains nothing before, takes the newest checkpoint of that folder. Then what it holds is written as whole
tensors, a checkpoint is saved beside the next step of training, and that step's figures and weights are written.
"""

import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.integration.learner_rank import trajectories
from trainer.adapters.lora import attach_adapter
from trainer.checkpoints.failure import CheckpointFailed
from trainer.checkpoints.restore import restore
from trainer.checkpoints.snapshot import Snapshot, snapshot
from trainer.checkpoints.store import CheckpointStore
from trainer.checkpoints.trained import parts_of
from trainer.config import AlgorithmConfig, CheckpointConfig, TrainerConfig
from trainer.configs.critic import CriticConfig, CriticOptimizerConfig
from trainer.configs.lora import LoraConfig
from trainer.configs.parallel import ParallelConfig
from trainer.configs.update import OptimizerConfig
from trainer.critic.model import load_critic
from trainer.model.load import load_model
from trainer.parallel import Ranks
from trainer.parallel.start import seat, start
from trainer.step import Learner

STEP = 2


def make_learner(model: str, *, replicas: int, lora: bool) -> Learner:
    config = TrainerConfig(
        model=model,
        device="cpu",
        lora=LoraConfig(rank=3) if lora else None,
        max_tokens_per_microbatch=32,
        parallel=ParallelConfig(replicas=replicas, deadline_seconds=60),
        algorithm=AlgorithmConfig(
            adv_estimator="gae", minibatches=2, kl_use="reward", kl_coef=0.1, kl_target=0.05, kl_horizon=100
        ),
        optimizer=OptimizerConfig(lr=3e-4, schedule="linear", total_steps=9),
        critic=CriticConfig(warmup_steps=1, optimizer=CriticOptimizerConfig(lr=3e-4, schedule="linear", total_steps=9)),
    )
    ranks = start(seat(), config, device=torch.device("cpu"))
    loaded = load_model(model, dtype="float32", attn_implementation="packed", device="cpu")
    if config.lora is not None:
        attach_adapter(loaded, config.lora, base_model=model)
    return Learner(loaded, config, ranks, critic=load_critic(config, device="cpu"))


def train(learner: Learner, step: int) -> dict[str, float]:
    return learner.train(trajectories(step, samples=8 - step), step=step, policy_version=step)


def whole_parts(learner: Learner) -> dict[str, Tensor]:
    return {
        f"{part}:{name}": (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for part, tensors in parts_of(learner).items()
        for name, one in tensors.items()
    }


def save_and_resume(learner: Learner, spec: dict[str, Any]) -> None:
    out, ranks = Path(spec["folder"]), learner.ranks
    if "resume" in spec:
        found, problems = make_store(spec["resume"], ranks).latest_verified()
        assert found is not None and not problems, problems
        restored = restore(found, learner)
        assert (restored.step, restored.extra, restored.config_changed) == (STEP, {"cursor": 3}, spec["changed"])
    else:
        for step in range(STEP):
            train(learner, step)
    held = whole_parts(learner) | {"kl_coef": torch.tensor(learner.kl_coef, dtype=torch.float64)}
    store = make_store(str(out / "checkpoints"), ranks)
    store.ready()
    writing = store.begin(snapshot(learner, step=STEP, policy_version=STEP, extra={"cursor": 3}))
    metrics = train(learner, STEP)
    writing.result(timeout=60)
    next_weights = whole_parts(learner)
    if ranks.leads:
        save_file(held, out / "held.safetensors")
        save_file(next_weights, out / "next.safetensors")
        (out / "metrics.json").write_text(json.dumps(metrics))


def make_store(folder: str, ranks: Ranks, *, deadline_seconds: float = 60.0) -> CheckpointStore:
    config = CheckpointConfig(deadline_seconds=deadline_seconds, keep_last=2, keep_every=5)
    return CheckpointStore(Path(folder), config, incarnation=os.getpid(), ranks=ranks)


class HeldUp(CheckpointStore):
    """A disk that does not answer for a while."""

    def write(self, taken: Snapshot) -> Path:
        self.go.wait()
        return super().write(taken)

    def hold(self) -> None:
        self.go.clear()

    go = threading.Event()


def fail_and_go_on(learner: Learner, spec: dict[str, Any]) -> None:
    """What each of some saves came to, on each rank: a full disk on rank 1, a rank that is late, and good ones."""
    ranks, told = learner.ranks, []
    config = CheckpointConfig(deadline_seconds=2, keep_last=2, keep_every=5)
    store = HeldUp(Path(spec["folder"]) / "checkpoints", config, incarnation=os.getpid(), ranks=ranks)
    store.go.set()

    def save(step: int) -> None:
        try:
            store.ready()
            told.append(store.begin(snapshot(learner, step=step, policy_version=step)).result(timeout=30).name)
        except CheckpointFailed as error:
            told.append(str(error))

    def tell(what: str) -> None:
        dist.barrier()
        told.append(what)

    save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    save(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tell("disk is there again")
    save(3)
    if ranks.rank == 1:
        store.hold()
        store.ready()
        late = store.begin(snapshot(learner, step=4, policy_version=4))
    else:
        save(4)
    tell("rank 1 is late")
    save(5)
    store.go.set()
    if ranks.rank == 1:
        told.append(type(late.exception(timeout=30)).__name__)
    tell("rank 1 is back")
    for step in range(6, 10):
        save(step)
    (Path(spec["folder"]) / f"told-{ranks.rank}.json").write_text(json.dumps(told))


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    learner = make_learner(spec["model"], replicas=spec.get("replicas", 1), lora=spec.get("lora", False))
    (fail_and_go_on if spec.get("fail") else save_and_resume)(learner, spec)
    if learner.ranks.size > 1:
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
