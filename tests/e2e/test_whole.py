"""What a run is as a whole: one trainer at a time, whoever started it, and a status for whoever asks."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from services.serve import REPLACED
from tests.e2e.conftest import StartRun
from tests.e2e.kit import Run, assert_effectively_once, write_recipe

OFFBEAT = (sys.executable, "-P", "-m", "services.cli")
STOPPED = "trainer:step.computed@3=stop"


def test_a_second_trainer_takes_over_and_the_first_is_refused_everywhere_and_leaves(start: StartRun) -> None:
    run = start("run.num_steps=12", "launch.rollout_servers=1", "conductor.heartbeat_seconds=0.3", faults=STOPPED)
    run.wait(lambda: run.fired() == [STOPPED])
    run.wait(run.pause)
    second = subprocess.Popen(
        [*OFFBEAT, "serve", "trainer", "--name", "second", "--join", run.launcher.address, "--folder", str(run.folder)]
    )
    try:
        run.wait(lambda: bool(run.events("joined", "second")) and newest_step(run) >= 3)
        shown = subprocess.run([*OFFBEAT, "status", str(run.folder)], capture_output=True, text=True, check=True).stdout
        assert "paused" in shown and "second" in shown and "lost: no heartbeat" in shown
        first = next(child.process for child in run.launcher.children if child.name == "trainer")
        assert first is not None
        run.signal("trainer", signal.SIGCONT)
        run.wait(lambda: first.poll() is not None)
        assert first.returncode == REPLACED
        assert "trainer incarnation 1 is fenced off: incarnation 2 has taken over" in run.log("trainer")
        run.wait(run.resume)
        run.wait()
        assert second.wait(timeout=20) == 0
    finally:
        second.kill()
        second.wait()
    assert_effectively_once(run, steps=12)
    assert len(run.events("joined", "trainer")) == 1, "the launcher does not start it again"
    assert all(len(set(found)) == 1 for found in run.hashes().values())


def newest_step(run: Run) -> int:
    return max(run.hashes(), default=0)


def test_a_run_whose_port_is_taken_ends_at_once_and_names_the_address(tmp_path: Path, model: Path) -> None:
    recipe = str(write_recipe(tmp_path, model=model))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        words = [*OFFBEAT, "train", recipe, f"launch.conductor_port={port}"]
        began = time.monotonic()
        refused = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert f"127.0.0.1:{port}" in refused.stderr
    assert time.monotonic() - began < 4.0
