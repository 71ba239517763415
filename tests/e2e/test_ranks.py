"""Whole runs whose trainer is several processes."""

import pytest

from tests.e2e.conftest import StartRun
from tests.e2e.kit import assert_effectively_once


@pytest.mark.parametrize("memory", ["snapshot", "streamed"])
def test_a_trainer_of_two_ranks_trains_and_pushes(start: StartRun, memory: str) -> None:
    run = start("launch.trainer_ranks=2", f"push.memory={memory}", "run.num_steps=4")
    run.wait()
    assert (run.folder / "logs" / "trainer.rank1.log").exists(), "the second rank is a process of its own"
    assert_effectively_once(run, steps=4)
    assert {row["policy_version"] for row in run.events("push")} >= {1, 2, 3, 4}
    assert all(len(set(found)) == 1 for found in run.hashes().values())
