"""Services die, stop, lie and repeat themselves in the middle of a run; every sample is still trained exactly once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import StartRun
from tests.e2e.kit import BATCH, assert_effectively_once

FRAGILE = """
import os
from pathlib import Path

left = Path("left")
if left.exists() and int(left.read_text()) > 0:
    left.write_text(str(int(left.read_text()) - 1))
    raise RuntimeError("not now")

def score(item):
    if item.prompt == "6+0=" and not left.exists():
        left.write_text("2")
        os.abort()
    return len(set(item.response)) / 5
"""
REWARD = """
import math, os, time

def score(item):
    if item.prompt == {nan!r} and sum(map(ord, item.response)) % 2:
        return math.nan
    if item.prompt == {hang!r}:
        time.sleep(60)
    if item.prompt == {crash!r}:
        os.abort()
    return len(set(item.response)) / 5
"""


def test_a_server_dies_while_it_generates_and_another_repeats_itself_lies_and_gets_a_torn_push(start: StartRun) -> None:
    faults = (
        "rollout-0:rollout.reply@2=kill",
        "rollout-1:rollout.reply@2=duplicate",
        "rollout-1:rollout.reply@4=liar",
        "rollout-1:push.commit@4=flip",
    )
    run = start(faults=", ".join(faults))
    run.wait()
    assert set(run.fired()) == set(faults)
    assert_effectively_once(run, steps=6)
    assert run.events("lost", "rollout-0") and not run.events("lost", "rollout-1")
    refused = run.summary()["ledger"]["refused"]
    assert refused["duplicate"] >= 1 and refused["logprobs_do_not_match_tokens"] == 1
    redone = [sample for batch in run.batches() for sample in batch.trajectories if sample.attempt > 1]
    assert len(redone) >= 2 and {sample.server for sample in redone} <= {"rollout-0", "rollout-1"}
    assert "checksum mismatch in buckets [0]" in run.log("trainer")


def test_both_servers_die_in_pushes_and_the_run_waits_until_one_is_back(start: StartRun) -> None:
    faults = ("rollout-0:push.begin@5=kill", "rollout-1:push.commit@6=kill")
    run = start("run.num_steps=8", faults=", ".join(faults))
    run.wait(lambda: set(run.fired()) == set(faults))
    run.wait(lambda: (status := run.status()) is not None and status.state == "starved")
    run.wait()
    assert_effectively_once(run, steps=8)
    assert run.events("lost", "rollout-0") and run.events("lost", "rollout-1")
    assert len(run.events("joined", "rollout-0") + run.events("joined", "rollout-1")) >= 3
    assert max(int(age) for age in run.summary()["staleness"]) <= 2


def test_the_conductor_dies_twice_and_everybody_joins_it_again(start: StartRun) -> None:
    faults = ("conductor:batch.recorded@3=kill", "conductor:leases.sent@2=kill")
    run = start("run.num_steps=8", faults=", ".join(faults))
    run.wait()
    assert set(run.fired()) == set(faults)
    assert_effectively_once(run, steps=8)
    assert set(run.hashes()) == set(range(1, 9)), "every report has come through"
    assert all(len(set(found)) == 1 for found in run.hashes().values())
    assert len(run.events("joined", "reward-0")) >= 2
    back = run.events("joined", "rollout-0") + run.events("joined", "rollout-1")
    assert len(back) >= 3, "one of them can be late: the other trains the run to its end"
    assert len(run.events("joined", "trainer")) == 3 and len(run.events("recovered")) == 2


def test_a_stopped_server_is_taken_out_and_joins_again_when_it_goes_on(start: StartRun) -> None:
    fault = "rollout-1:rollout.leased@3=stop"
    run = start("run.num_steps=20", "conductor.heartbeat_seconds=0.3", "push.deadline_seconds=2", faults=fault)
    run.wait(lambda: bool(run.events("lost", "rollout-1")))
    assert run.fired() == [fault]
    step = int(run.rows("metrics")[-1]["step"]) if run.rows("metrics") else 0
    run.wait(lambda: len(run.rows("metrics")) >= step + 3)
    run.wait(run.pause)
    run.signal("rollout-1", signal.SIGCONT)
    run.wait(lambda: run.serving() == 4)
    run.wait(run.resume)
    run.wait()
    assert_effectively_once(run, steps=20)
    assert run.events("lost", "rollout-1")[0]["why"] == "no heartbeat"
    last = run.batches()[-1]
    assert {sample.server for sample in last.trajectories} == {"rollout-0", "rollout-1"}


def test_reward_and_reference_services_die_under_load_and_no_sample_goes_without_them(
    start: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(FRAGILE)
    faults = ("reward-0:reward.asked@1=kill", "reference-0:reference.asked@3=kill")
    run = start(
        "reward.functions=[{target: './reward.py:score'}]",
        "reward.max_restarts=1",
        "reference.enabled=true",
        "launch.rollout_servers=1",
        faults=", ".join(faults),
    )
    run.wait()
    assert set(run.fired()) == set(faults)
    summary = run.summary()["ledger"]
    assert_effectively_once(run, steps=6, samples=summary["accepted"] - sum(summary["dropped"].values()))
    assert len(run.events("lost", "reference-0")) == 1 and len(run.events("joined", "reference-0")) == 2
    assert len(run.events("lost", "reward-0")) == 2 and len(run.events("joined", "reward-0")) == 3
    assert (tmp_path / "left").read_text() == "0" and "no reward: reward worker did not start 2 times" in run.log(
        "reward-0"
    )
    for batch in run.batches():
        assert all(sample.HasField("reward") and sample.reward_route for sample in batch.trajectories)
        assert all(sample.HasField("reference_logprobs") for sample in batch.trajectories)


def test_a_reward_function_that_fails_costs_its_own_samples_and_no_others(
    start: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = {"nan": "4+7=", "hang": "6+0=", "crash": "9+2="}
    (tmp_path / "reward.py").write_text(REWARD.format(**prompts))
    run = start(
        "reward.functions=[{target: './reward.py:score'}]",
        "reward.timeout_seconds=0.3",
        "reward.num_workers=2",
        "run.max_staleness=0",
        "launch.rollout_servers=1",
    )
    run.wait()
    rows = run.rows("quarantine")
    reasons = {(row["prompt"], row["reason"].partition(":")[0]) for row in rows}
    assert reasons == {
        (prompts["nan"], "reward_invalid_value"),
        (prompts["hang"], "reward_timeout"),
        (prompts["crash"], "reward_crash"),
    }
    assert 8 < len(rows) < 12, "of one group only some samples are put aside"
    assert all(row["score_attempts"] == 2 and row["response"] for row in rows if row["response"] is not None)
    ledger = run.summary()["ledger"]
    assert ledger["quarantined"] == len(rows) and not ledger["dropped"]
    assert_effectively_once(run, steps=6, samples=ledger["accepted"] - len(rows))
    assert ledger["trained"] == 6 * BATCH - sum(row["prompt"] == prompts["nan"] for row in rows)
