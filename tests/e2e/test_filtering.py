"""A whole run with dynamic sampling: half the prompts give every sample one reward."""

from __future__ import annotations

from collections import defaultdict

from services.records.book import Batch
from tests.e2e.conftest import StartRun
from tests.e2e.kit import REWARDS, assert_effectively_once

STEPS, LIMIT = 5, 3


def equal_groups(batch: Batch) -> int:
    rewards = defaultdict(set)
    for trajectory in batch.trajectories:
        rewards[trajectory.key.group].add(trajectory.reward)
    return sum(len(values) == 1 for values in rewards.values())


def test_groups_of_equal_reward_are_replaced_and_counted(run_inline: StartRun) -> None:
    run = run_inline(
        f"run.num_steps={STEPS}",
        f"run.dynamic_sampling={LIMIT}",
        f"reward.functions=[{{target: '{REWARDS}:even_or_digits'}}]",
    )
    assert_effectively_once(run, steps=STEPS)
    dropped = run.summary()["ledger"]["dropped"]
    group_size = run.config.run.group_size
    assert 0 < dropped["filtered"] <= STEPS * LIMIT * group_size and dropped["filtered"] % group_size == 0
    shares = [row["groups_equal_reward_share"] for row in run.rows("metrics")]
    assert shares == [equal_groups(batch) / run.config.run.prompts_per_step for batch in run.batches()]
    counted = [row["dropped_filtered"] for row in run.rows("metrics")]
    assert counted == sorted(counted) and 0 < counted[-1] <= dropped["filtered"]
