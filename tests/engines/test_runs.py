"""Whole runs, one process a service: the demo's recipe with another engine, and a fleet of two engines."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.compose import load_config
from tests.e2e.kit import Run, assert_effectively_once
from tests.engines.conftest import engine_params

STEPS = 20
BATCH = 32 * 8
SHORT = (f"run.num_steps={STEPS}", "tiny.warm_start_steps=0", "trainer.checkpoint.every_steps=10")
others = pytest.mark.parametrize("engine_name", engine_params(["vllm", "sglang"]))
StartRun = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartRun]:
    started: list[Run] = []

    def start_demo(*overrides: str) -> Run:
        config = load_config("demo", [f"run.folder={tmp_path}", *SHORT, *overrides])
        run = Run(config, config.run_folder, tmp_path / "faults.log")
        started.append(run)
        return run.start().gather()

    yield start_demo
    for run in started:
        run.stop()


@others
def test_the_demo_runs_with_this_engine(start: StartRun, engine_name: str) -> None:
    run = start(f"rollout.engine={engine_name}", "launch.rollout_servers=1")
    run.wait()
    assert_effectively_once(run, steps=STEPS, samples=STEPS * BATCH)
    assert_versions_advance(run)


@others
def test_two_engines_share_a_run(start: StartRun, engine_name: str) -> None:
    run = start("launch.rollout_servers=1", f"launch.fleet=[{{engine: {engine_name}}}]")
    run.wait()
    assert_effectively_once(run, steps=STEPS, samples=STEPS * BATCH)
    servers = {sample.server for batch in run.batches() for sample in batch.trajectories}
    assert servers == {"rollout-0", "rollout-1"}
    assert_versions_advance(run)


def assert_versions_advance(run: Run) -> None:
    """Every server took the pushes: its last samples are of late versions."""
    newest: dict[str, int] = {}
    for batch in run.batches():
        for sample in batch.trajectories:
            newest[sample.server] = max(newest.get(sample.server, 0), sample.spans[-1].policy_version)
    assert min(newest.values()) >= STEPS - 5, newest
    assert not run.events("evicted") and not run.events("lost")
