"""Runs for the tests here: one tiny model for all, plain runs that several tests look at, and runs with faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.kit import Run, make_run
from trainer.small.tiny import make_tiny_qwen3

StartRun = Callable[..., Run]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of the demo's size."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny", preset="demo", seed=3)


@pytest.fixture
def start(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartRun]:
    """Start runs of the recipe with overrides and a plan of faults; they are stopped when the test is over."""
    started: list[Run] = []

    def start_run(*overrides: str, faults: str = "") -> Run:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        run = make_run(folder, *overrides, model=model)
        monkeypatch.setenv("OFFBEAT_FAULTS", faults)
        monkeypatch.setenv("OFFBEAT_FAULTS_LOG", str(run.fault_log))
        started.append(run)
        return run.start().gather()

    yield start_run
    for run in started:
        run.stop()


@pytest.fixture
def run_inline(tmp_path: Path, model: Path) -> StartRun:
    """Runs of the recipe with overrides, from start to end in this process: for what needs no process to die."""
    return lambda *overrides: make_run(tmp_path, *overrides, model=model).inline()


@pytest.fixture(scope="session")
def synchronous_run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    """Ten undisturbed synchronous steps on one rollout server, a checkpoint every two."""
    return finished(tmp_path_factory.mktemp("synchronous"), *SYNCHRONOUS, model=model)


@pytest.fixture(scope="session")
def asynchronous_run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    """Eight undisturbed asynchronous steps on two rollout servers, a checkpoint for each step."""
    overrides = ("run.num_steps=8", "trainer.checkpoint.every_steps=1", "trainer.checkpoint.keep_last=20")
    return finished(tmp_path_factory.mktemp("asynchronous"), *overrides, model=model)


SYNCHRONOUS = ("run.num_steps=10", "run.max_staleness=0", "launch.rollout_servers=1")


def finished(folder: Path, *overrides: str, model: Path) -> Run:
    run = make_run(folder, *overrides, model=model)
    try:
        run.start().gather().wait()
    finally:
        run.stop()
    return run
