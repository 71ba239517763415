"""What a person sees of a run, as text."""

import io

from rich.console import Console

import protos
from services.commands.view import Rates, line, panel


def test_the_panel_shows_each_rollout_server_s_logprobs_beside_the_trainer_s_and_why_one_was_taken_out() -> None:
    services = [
        protos.ServiceStatus(name="rollout-0", role="rollout", state="serving", logprob_diff_mean=0.00123),
        protos.ServiceStatus(name="rollout-1", role="rollout", state="evicted: too far off", logprob_diff_mean=0.5),
        protos.ServiceStatus(name="rollout-2", role="rollout", state="joined"),
    ]
    status = protos.ConductorStatusReply(state="running", services=services, run_folder="outputs/run")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel(status, Rates()))
    text = console.export_text()
    assert "logprob diff  rollout-0 0.00123  rollout-1 0.5 " in text
    assert "evicted: too far off" in text


def test_the_line_tells_the_last_evaluation_and_a_better_one_before_it() -> None:
    status = protos.ConductorStatusReply(state="running", run_folder="outputs/run")
    assert "pass@1" not in line(status, Rates())
    status.evaluation.update({"pass@1": 0.25, "version": 40, "best_pass@1": 0.25, "best_version": 40})
    assert line(status, Rates()).count("pass@1 0.250 at version 40") == 1 and "best" not in line(status, Rates())
    status.evaluation.update({"best_pass@1": 0.5, "best_version": 20})
    assert "pass@1 0.250 at version 40  best 0.500 at 20" in line(status, Rates())
