"""Evaluation beside training: a whole run is not held up by it, and a server that dies in it costs no sample."""

from __future__ import annotations

from typing import Any

from tests.e2e.conftest import StartRun
from tests.e2e.kit import REWARDS, Run, assert_effectively_once

PROMPTS, SAMPLES = 6, 3
EVALUATION = (
    "evaluation.every_steps=2",
    f"evaluation.num_prompts={PROMPTS}",
    f"evaluation.samples_per_prompt={SAMPLES}",
    "evaluation.temperature=1.0",
    "evaluation.k=[1,3]",
    "evaluation.threshold=0.5",
    "evaluation.at_start=true",
    # The reward `digits` gives shares of 1, and one-digit addition has few held-out problems.
    "evaluation.split=train",
)


def judged_right(row: dict[str, Any]) -> bool:
    """Whether a line of evals.jsonl holds together."""
    bounds = row["oldest_version"] <= row["newest_version"] and row["oldest_version"] >= row["version"]
    counts = row["num_prompts"] == PROMPTS and row["num_samples"] == PROMPTS * SAMPLES and row["failures"] == {}
    return bounds and counts and 0.0 <= row["pass@1"] <= row["pass@3"] <= 1.0 and 0.0 <= row["maj@3"] <= 1.0


def begun(run: Run) -> list[int]:
    """The versions that evaluations were begun for."""
    return [int(row["version"]) for row in run.events("evaluation_begun")]


def test_versions_are_evaluated_while_the_run_trains(start: StartRun) -> None:
    run = start(*EVALUATION)
    run.wait()
    assert_effectively_once(run, steps=6)
    rows = run.rows("evals")
    told = run.events("evaluation")
    dropped = run.events("evaluation_dropped")
    assert begun(run)[0] == 0 and begun(run)[-1] == 6 and set(begun(run)) <= {0, 2, 3, 4, 5, 6}
    assert len(rows) + len(dropped) == len(begun(run)), "each has ended or was given up"
    assert [row["version"] for row in rows] == [row["version"] for row in told]
    assert rows[-1]["version"] == rows[-1]["oldest_version"] == rows[-1]["newest_version"] == 6, "the end waits for it"
    assert all(judged_right(row) for row in rows)
    summary = run.summary()["evaluation"]
    assert summary["last"] == rows[-1] and summary["dropped"] == len(dropped)
    assert summary["best"]["pass@1"] == max(row["pass@1"] for row in rows)
    trained = [trajectory.key for batch in run.batches() for trajectory in batch.trajectories]
    assert trained and not any(key.evaluation for key in trained), "no sample of an evaluation is trained on"


LAST_ONLY = (*EVALUATION, "evaluation.at_start=false", "evaluation.every_steps=6")
"""Nothing is due after it, so nothing can take its place."""


def test_a_server_that_dies_in_an_evaluation_costs_no_sample(start: StartRun) -> None:
    fault = "rollout-1:rollout.evaluation@1=kill"
    run = start(*LAST_ONLY, faults=fault)
    run.wait()
    assert run.fired() == [fault] and run.events("lost", "rollout-1")
    assert_effectively_once(run, steps=6)
    (row,) = run.rows("evals")
    assert begun(run) == [6] and judged_right(row) and row["version"] == row["newest_version"] == 6


def test_a_conductor_that_dies_in_an_evaluation_begins_it_again(start: StartRun) -> None:
    fault = "conductor:evaluation.leased@1=kill"
    run = start(*LAST_ONLY, faults=fault)
    run.wait()
    assert run.fired() == [fault] and len(run.events("recovered")) == 1
    assert_effectively_once(run, steps=6)
    (row,) = run.rows("evals")
    assert begun(run) == [6, 6] and judged_right(row) and run.summary()["evaluation"]["last"] == row


def test_a_reward_that_fails_leaves_no_verdict_and_blocks_nothing(run_inline: StartRun) -> None:
    run = run_inline(
        *EVALUATION,
        "evaluation.at_start=false",
        "evaluation.data={type: arithmetic, digits: 2}",
        f"reward.functions=[{{target: '{REWARDS}:digits_of_small_sums'}}]",
    )
    assert_effectively_once(run, steps=6)
    last = run.rows("evals")[-1]
    assert last["failures"] == {"reward_error": PROMPTS * SAMPLES} and "pass@1" not in last
    assert run.summary()["evaluation"]["last"] == last
