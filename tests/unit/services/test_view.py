"""What a person sees of a run, as text."""

import io

from rich.console import Console

import protos
from services.view import Rates, panel


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
