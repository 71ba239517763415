"""Real runs of a few seconds: a recipe, one process per service, faults by plan, and what the run left behind.

run = start("run.max_staleness=0", faults="trainer:step.computed@3=kill")
run.wait()
assert_effectively_once(run, steps=10)
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml

import protos
from services.commands.inline import run_all
from services.compose import load_config
from services.config import Config
from services.launch import Launcher, prepare_folder, tail
from services.records.book import Batch
from services.records.ledger import Ledger

POLL_SECONDS = 0.05
RUN_SECONDS = 90.0
PROMPTS, SAMPLES = 4, 4
BATCH = PROMPTS * SAMPLES
REWARDS = Path(__file__).with_name("rewards.py")
RECIPE: dict[str, Any] = {
    "run": {
        "name": "run",
        "num_steps": 6,
        "prompts_per_step": PROMPTS,
        "group_size": SAMPLES,
        "max_staleness": 2,
        "seed": 7,
    },
    "data": {"type": "arithmetic", "digits": 1},
    "rollout": {"max_num_seqs": 32, "max_model_len": 32, "threads": 1, "sampling": {"max_tokens": 5}},
    "reward": {"functions": [{"target": f"{REWARDS}:digits"}], "timeout_seconds": 1.0},
    "trainer": {
        "threads": 1,
        "max_tokens_per_microbatch": 64,
        "optimizer": {"lr": 1.0e-4, "weight_decay": 0.01},
        "checkpoint": {"every_steps": 2},
    },
    "conductor": {"lease_seconds": 20},
    "push": {"deadline_seconds": 4, "bucket_mib": 0.5},
    "launch": {"rollout_servers": 2},
}


def write_recipe(folder: Path, *, model: Path) -> Path:
    """A recipe file whose run folder lies in `folder`."""
    recipe = RECIPE | {"model": str(model), "run": RECIPE["run"] | {"folder": str(folder / "outputs")}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@dataclass
class Run:
    """A run on this box; the launcher's loop turns inside `wait`."""

    config: Config
    folder: Path
    fault_log: Path
    launcher: Launcher = field(init=False)

    def start(self) -> Run:
        """Start all services; once more after an end or a stop."""
        self.launcher = Launcher(self.config, prepare_folder(self.config, fresh=False))
        self.launcher.start()
        return self

    def inline(self) -> Run:
        """From start to end on one loop of this process: a run of two steps takes a second or two."""
        asyncio.run(run_all(self.config, prepare_folder(self.config, fresh=False)))
        return self

    def gather(self) -> Run:
        """Let a started run wait with its first lease until all services have joined."""
        self.wait(self.pause)
        self.wait(lambda: self.serving() == len(self.launcher.children) - 1)
        self.wait(self.resume)
        return self

    def wait(self, until: Callable[[], bool] | None = None, *, seconds: float = RUN_SECONDS) -> None:
        """Turn until the run has ended (default) or `until` holds; AssertionError with the logs after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.launcher.watch()
            if ended and until is None:
                self.launcher.stop()
                return
            if until is not None and until():
                return
            assert not ended, f"the run ended early\n{self.told()}"
            time.sleep(POLL_SECONDS)
        raise AssertionError(f"not there after {seconds} s\n{self.told()}")

    def stop(self) -> None:
        """Drain everything; what a test has stopped goes on first, so that it can leave."""
        for child in self.launcher.children:
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(signal.SIGCONT)
        self.launcher.stop()

    def pid(self, name: str) -> int:
        """The process that is `name` now."""
        process = next(child.process for child in self.launcher.children if child.name == name)
        assert process is not None, f"{name} is not running"
        return process.pid

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def pause(self) -> bool:
        """No further leases; whether the conductor was there to hear it."""
        with self.conductor() as stub, suppress(grpc.RpcError):
            return stub.PauseRun(protos.PauseRunRequest(), timeout=2.0) is not None
        return False

    def resume(self) -> bool:
        """Leases again; whether the conductor was there to hear it."""
        with self.conductor() as stub, suppress(grpc.RpcError):
            return stub.ResumeRun(protos.ResumeRunRequest(), timeout=2.0) is not None
        return False

    @contextmanager
    def conductor(self) -> Iterator[protos.ConductorStub]:
        """The conductor's RPCs."""
        with grpc.insecure_channel(self.launcher.address) as channel:
            yield protos.ConductorStub(channel)

    # What can be seen from outside.

    def serving(self) -> int:
        """Services that have joined and are ready to work."""
        status = self.status()
        return 0 if status is None else sum(service.state == "serving" for service in status.services)

    def status(self) -> protos.ConductorStatusReply | None:
        """What the conductor says; None where it does not answer."""
        with self.conductor() as stub, suppress(grpc.RpcError):
            return stub.Status(protos.ConductorStatusRequest(), timeout=2.0)
        return None

    def told(self) -> str:
        """The last lines of every service."""
        return "\n".join(tail(path, lines=8) for path in sorted((self.folder / "logs").glob("*.out")))

    def log(self, name: str) -> str:
        """Everything that a service has said."""
        return (self.folder / "logs" / f"{name}.out").read_text()

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The lines of metrics, events or quarantine."""
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, kind: str, service: str = "") -> list[dict[str, Any]]:
        return [row for row in self.rows("events") if row["kind"] == kind and service in ("", row["service"])]

    def hashes(self) -> dict[int, list[str]]:
        """Step -> the weights_hash of each report of it, in order."""
        found: dict[int, list[str]] = {}
        for row in self.rows("metrics"):
            found.setdefault(int(row["step"]), []).append(row["weights_hash"])
        return found

    def batches(self) -> list[Batch]:
        """What the ledger has recorded, with the trajectories that it still holds."""
        ledger = Ledger(self.folder / "ledger.sqlite")
        try:
            return ledger.batches(after=0)
        finally:
            ledger.close()

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step}"

    def fired(self) -> list[str]:
        """The faults that have happened, in order."""
        return self.fault_log.read_text().split() if self.fault_log.exists() else []


def make_run(folder: Path, *overrides: str, model: Path) -> Run:
    """A run of the recipe with overrides, not started."""
    config = load_config(str(write_recipe(folder, model=model)), overrides)
    return Run(config, config.run_folder, folder / "faults.log")


def assert_effectively_once(run: Run, *, steps: int, samples: int | None = None) -> None:
    """The oracle: the last step, the ledger equation, nothing in flight, no sample trained twice or missing."""
    summary = run.summary()
    ledger = summary["ledger"]
    assert summary["steps"] == steps
    assert ledger["balanced"] and ledger["in_flight"] == 0, ledger
    keys = [key for batch in run.batches() for key in batch.keys]
    assert len(keys) == len(set(keys)), "a sample was trained twice"
    assert ledger["trained"] == len(keys) == (steps * BATCH if samples is None else samples), ledger


def flip_byte(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
