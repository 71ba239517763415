"""A disk that takes no checkpoint costs no step: each failure is told and counted, and what is lost can be replayed."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.kit import assert_effectively_once, make_run


def test_checkpoints_that_fail_are_counted_and_the_run_goes_on(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path, "run.num_steps=4", "launch.rollout_servers=1", model=model)
    (run.folder / "checkpoints" / "latest").mkdir(parents=True)  # the pointer cannot be moved
    run.inline()
    assert_effectively_once(run, steps=4)
    told = [row for row in run.events("warning", "trainer") if row["message"] == "a checkpoint failed"]
    assert told and told[-1]["step"] == "4", "the end of a run saves, too"
    assert all("was not written" in row["why"] for row in told)
    assert run.summary()["checkpoints"] == {"written": 0, "failed": len(told)}
    assert not list((run.folder / "checkpoints").glob("*.tmp-*"))
