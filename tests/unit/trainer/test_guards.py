"""Skipped updates are counted with their samples, alarms are raised once, and what a checkpoint keeps of both."""

import json
import math

import pytest
import torch

from trainer.configs.guards import GuardsConfig
from trainer.guarding.guards import Alarm, Guards, Skip

NOBODY = torch.zeros(0, dtype=torch.int64)
KEYS = ["0/0", "0/1", "1/0", "1/1"]


def skip_one(guards: Guards) -> None:
    """An update of two micro-batches of which the second has no finite loss."""
    guards.skipped(loss=math.nan, grad_norm=1.0, rows_B=torch.tensor([0, 1, 3]), suspects_B=torch.tensor([1, 3]))


def test_a_skipped_update_is_told_with_its_samples_and_the_suspects() -> None:
    guards = Guards(GuardsConfig())
    guards.begin(KEYS)
    guards.taken()
    skip_one(guards)
    guards.skipped(loss=1.0, grad_norm=math.inf, rows_B=torch.tensor([2]), suspects_B=NOBODY)
    assert guards.skips == [
        Skip(samples=("0/0", "0/1", "1/1"), suspects=("0/1", "1/1"), reason="loss is nan"),
        Skip(samples=("1/0",), suspects=(), reason="gradient norm is inf"),
    ]
    assert guards.skips_in_a_row["policy"] == 2 and guards.stop_reason == ""
    guards.begin(KEYS)
    assert guards.skips == [] and guards.skips_in_a_row["policy"] == 2


def test_the_run_stops_after_so_many_in_a_row_over_steps_and_over_a_resume() -> None:
    guards = Guards(GuardsConfig(max_skips_in_a_row=3))
    for _ in range(2):
        guards.begin(KEYS)
        skip_one(guards)
    again = Guards(guards.config)
    again.restore(json.loads(json.dumps(guards.state())))
    again.begin(KEYS)
    assert again.stop_reason == ""
    skip_one(again)
    assert again.stop_reason == (
        "3 updates in a row were left out (trainer.guards.max_skips_in_a_row=3): of the last one the loss is nan, in"
        " the micro-batches of samples 0/1, 1/1"
    )
    again.taken()
    assert again.skips_in_a_row["policy"] == 0 and again.stop_reason == ""


def test_the_critics_updates_in_a_row_are_counted_apart_over_steps_and_over_a_resume() -> None:
    guards, rows = Guards(GuardsConfig(max_skips_in_a_row=2)), torch.tensor([0, 3])
    for step in range(2):
        assert guards.stop_reason == ""
        kept = json.loads(json.dumps(guards.state()))
        guards = Guards(guards.config)
        guards.restore(kept)
        guards.begin(KEYS)
        guards.skipped(loss=1.0, grad_norm=math.nan, rows_B=rows, suspects_B=NOBODY, of="critic")
        guards.taken()
        assert guards.skips_in_a_row == {"policy": 0, "critic": step + 1}
    assert guards.stop_reason == (
        "2 updates in a row were left out (trainer.guards.max_skips_in_a_row=2): of the last one the critic's gradient"
        " norm is nan, of samples 0/0, 1/1"
    )
    skip_one(guards)
    assert "critic's" in guards.stop_reason, "one skip of the policy does not hide the critic's"
    guards.taken(of="critic")
    assert guards.stop_reason == "" and guards.skips_in_a_row == {"policy": 1, "critic": 0}


def test_many_samples_are_named_in_part_and_zero_never_stops() -> None:
    for limit in (0, 1):
        guards = Guards(GuardsConfig(max_skips_in_a_row=limit))
        guards.begin([str(number) for number in range(20)])
        guards.skipped(loss=0.0, grad_norm=math.nan, rows_B=torch.arange(20), suspects_B=NOBODY)
        assert guards.stop_reason.endswith("13, 14, 15 and 4 more, see events.jsonl") == (limit == 1)
        assert len(guards.skips[0].samples) == 20


def test_an_alarm_is_raised_when_its_threshold_is_crossed_and_not_while_it_stays_so() -> None:
    guards = Guards(GuardsConfig(grad_norm_above=2.0, entropy_below=0.5))
    seen = []
    for grad_norm, entropy in ((2.0, 0.5), (2.1, 0.6), (9.0, 0.4), (1.0, 0.4), (math.nan, 0.7)):
        guards.begin(KEYS)
        metrics = guards.look({"grad_norm": grad_norm, "entropy": entropy, "kl": 99.0})
        seen.append((metrics["alarms"], [alarm.name for alarm in guards.alarms]))
    assert seen == [
        (0, []),
        (1, ["grad_norm_above"]),
        (2, ["entropy_below"]),
        (1, []),
        (1, ["grad_norm_above"]),
    ]
    assert guards.stop_reason == ""


def test_a_step_without_the_figure_changes_nothing_and_an_alarm_survives_a_resume() -> None:
    guards = Guards(GuardsConfig(kl_above=0.1))
    guards.begin(KEYS)
    assert guards.look({"kl": 0.2}) == {"alarms": 1.0}
    assert guards.alarms == [Alarm(name="kl_above", value=0.2, threshold=0.1)]
    again = Guards(guards.config)
    again.restore(guards.state())
    again.begin(KEYS)
    assert again.look({}) == again.look({"kl": 0.3}) == {"alarms": 1.0} and again.alarms == []
    again.restore({})
    assert again.look({}) == {"alarms": 0.0}


@pytest.mark.parametrize("stop", [False, True])
def test_an_alarm_stops_the_run_where_it_shall(stop: bool) -> None:
    guards = Guards(GuardsConfig(logprob_diff_above=0.25, stop_on_alarm=stop))
    guards.begin(KEYS)
    guards.look({"logprob_diff_mean": 0.3})
    said = "a figure is out of bounds and trainer.guards.stop_on_alarm is set: logprob_diff_above=0.25"
    assert guards.stop_reason == (said if stop else "")
