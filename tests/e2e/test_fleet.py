"""Rollout servers of two kinds in one run, one of them in a Python of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.conftest import StartRun
from tests.e2e.kit import assert_effectively_once

STEPS = 20


def test_two_kinds_of_servers_share_a_run(start: StartRun, tmp_path: Path) -> None:
    python, trace = tmp_path / "python", tmp_path / "trace"
    python.write_text(f'#!/bin/sh\necho "$@" >> {trace}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run = start(
        f"run.num_steps={STEPS}",
        "launch.rollout_servers=1",
        f"launch.fleet=[{{rollout: {{max_num_seqs: 3}}, python: {python}}}]",
    )
    run.wait()
    assert_effectively_once(run, steps=STEPS)
    servers = {sample.server for batch in run.batches() for sample in batch.trajectories}
    assert servers == {"rollout-0", "rollout-1"}
    probe, serve = trace.read_text().splitlines()
    assert "import services" in probe, "that Offbeat is there is seen before anything starts"
    assert "serve rollout --name rollout-1" in serve and serve.endswith("rollout.max_num_seqs=3")
