"""A fleet that is not all of one kind: a server whose logprobs are wrong is found out; the run goes on without it."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.conftest import StartRun
from tests.e2e.kit import Run, assert_effectively_once

LIMIT, SHIFT = 0.05, 0.5
JUDGED = (f"conductor.max_logprob_mismatch={LIMIT}", "conductor.mismatch_patience=2")
LIAR = "rollout-1:rollout.reply@1+=shift"


def test_a_lying_server_is_taken_out_and_the_honest_one_ends_the_run(start: StartRun) -> None:
    run = start("run.num_steps=14", *JUDGED, faults=LIAR)
    run.wait()
    assert_effectively_once(run, steps=14)
    (event,) = run.events("evicted")
    assert event["service"] == "rollout-1"
    assert "over 0.05 nats a token in 2 steps in a row" in event["why"] and "evicted" in run.log("rollout-1")
    assert not run.events("lost"), "the process stays, without work"
    seen = [row for row in run.rows("metrics") if "logprob_diff_mean/rollout-1" in row]
    assert seen and all(row["logprob_diff_mean/rollout-1"] > SHIFT - 0.1 for row in seen)
    assert all(row["logprob_diff_tokens/rollout-1"] > 0 for row in seen)
    honest = [row["logprob_diff_mean/rollout-0"] for row in run.rows("metrics") if "logprob_diff_mean/rollout-0" in row]
    assert len(honest) >= 12 and max(honest) < SHIFT / 2
    assert {sample.server for sample in run.batches()[-1].trajectories} == {"rollout-0"}


def test_the_last_server_is_taken_out_too_and_the_run_says_why_it_stands_until_a_new_process_comes(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = LIAR.replace("rollout-1", "rollout-0")
    run = start("run.max_staleness=0", "launch.rollout_servers=1", *JUDGED, faults=liar)
    run.wait(lambda: state_of(run) == "rollout_evicted")
    assert [event["service"] for event in run.events("evicted")] == ["rollout-0"]
    (warning,) = run.events("warning")
    assert warning["message"] == "the run stands: every rollout server was taken out of rotation"
    status = run.status()
    assert status is not None and status.ledger.balanced
    (server,) = [service for service in status.services if service.role == "rollout"]
    assert server.state.startswith("evicted: logprob mismatch over 0.05")
    assert server.logprob_diff_mean == pytest.approx(SHIFT, abs=1e-3), "staleness 0: nothing but the lie"
    run.signal("conductor", signal.SIGKILL)
    run.wait(lambda: len(run.events("joined", "rollout-0")) == 2 and state_of(run) == "rollout_evicted")
    monkeypatch.setenv("OFFBEAT_FAULTS", "")
    run.signal("rollout-0", signal.SIGKILL)
    run.wait()
    assert_effectively_once(run, steps=6)
    assert len(run.events("evicted")) == 1, "samples of the old process are not held against the new one"


def state_of(run: Run) -> str:
    status = run.status()
    return "" if status is None else status.state
