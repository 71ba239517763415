"""One of the trainer's processes is killed: all of them start again, resume from their shards, and nothing is lost."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import StartRun
from tests.e2e.kit import assert_effectively_once


@pytest.mark.slow
def test_a_killed_rank_takes_the_trainer_down_and_it_goes_on_from_the_last_whole_checkpoint(start: StartRun) -> None:
    fault = "trainer-rank-1:order.save@2=kill"
    run = start("launch.trainer_ranks=2", "run.num_steps=6", "conductor.keep_payload_steps=0", faults=fault)
    run.wait()
    assert run.fired() == [fault]
    assert_effectively_once(run, steps=6)
    assert len(run.events("joined", "trainer")) == 2
    assert {step: found for step, found in run.hashes().items() if len(set(found)) > 1} == {}
    replayed = {int(row["step"]) for row in run.rows("metrics") if row["replay"]}
    assert min(replayed) == 3, "the second save was torn by the kill, the first is whole"
    assert "resumed" in run.log("trainer")
    names = {file.name for file in run.checkpoint(6).iterdir()}
    assert {f"rank-{rank}-of-2.{part}.safetensors" for rank in (0, 1) for part in ("model", "optimizer")} < names
    assert not list((run.folder / "checkpoints").glob("*.tmp-*"))
