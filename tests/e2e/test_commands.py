"""The commands on a finished run, a second machine's rollout server, and what is refused at the door."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import protos
from tests.e2e.conftest import StartRun
from tests.e2e.kit import PROMPTS, Run, assert_effectively_once, write_recipe

OFFBEAT = (sys.executable, "-P", "-m", "services.cli")


def offbeat(*words: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command of ours to its end."""
    return subprocess.run([*OFFBEAT, *words], capture_output=True, text=True, timeout=seconds, check=False)


def test_a_finished_run_is_shown_exported_and_evaluated(asynchronous_run: Run, tmp_path: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    shown = offbeat("status", str(asynchronous_run.folder))
    assert shown.returncode == 0 and '"balanced": true' in shown.stdout

    exported = offbeat("export", str(asynchronous_run.folder), str(tmp_path / "exported"))
    assert exported.returncode == 0, exported.stderr
    assert not (tmp_path / "exported" / "optimizer.safetensors").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")

    recipe = str(write_recipe(tmp_path, model=model))
    judged = offbeat(
        "eval", "--model", str(tmp_path / "exported"), "--recipe", recipe, "--out", str(tmp_path / "answers.jsonl")
    )
    assert judged.returncode == 0, judged.stderr
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == json.loads(judged.stdout)["num_prompts"] > 0
    assert all(answer["reward"] is not None for answer in answers)

    own = offbeat("eval", "--model", str(asynchronous_run.folder), "--k", "1,2", "--num-prompts", "3")
    assert own.returncode == 0, own.stderr
    told = json.loads(own.stdout)
    assert told["num_prompts"] == 3 and 0 <= told["pass@1"] <= told["pass@2"] <= 1 and told["temperature"] == 1.0


def test_a_finished_run_is_not_started_again(asynchronous_run: Run, tmp_path: Path) -> None:
    again = offbeat("train", str(asynchronous_run.folder / "config.yaml"))
    assert again.returncode == 1
    assert "holds a finished run" in again.stderr


def test_a_second_machines_rollout_server_needs_only_an_address_and_serves(start: StartRun) -> None:
    run = start("run.num_steps=40", "launch.rollout_servers=1")
    command = [*OFFBEAT, "serve", "rollout", "--name", "node-two", "--join", run.launcher.address]
    second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        run.pause()
        run.wait(lambda: any(service.name == "node-two" and service.state == "serving" for service in services(run)))
        run.resume()
        run.wait()
        assert second.wait(timeout=20) == 0, "it leaves by itself when the run is over"
    finally:
        second.kill()
        second.wait()
    assert_effectively_once(run, steps=40)
    servers = {trajectory.server for batch in run.batches() for trajectory in batch.trajectories}
    assert servers == {"rollout-0", "node-two"}


def services(run: Run) -> list[protos.ServiceStatus]:
    status = run.status()
    return [] if status is None else list(status.services)


def test_the_launcher_drains_at_sigterm_and_the_same_command_goes_on(tmp_path: Path, model: Path) -> None:
    recipe = str(write_recipe(tmp_path, model=model))
    words = [*OFFBEAT, "train", recipe, "run.num_steps=60", "launch.rollout_servers=1"]
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "outputs" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    _, told = first.communicate(timeout=40)
    assert first.returncode == 1 and "the same command goes on" in told
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == 60 and summary["ledger"]["balanced"] and summary["ledger"]["in_flight"] == 0
    assert summary["samples"] == 60 * PROMPTS * 4


def test_a_taken_port_is_told_with_its_address_in_two_seconds(tmp_path: Path, model: Path) -> None:
    recipe = str(write_recipe(tmp_path, model=model))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        began = time.monotonic()
        refused = offbeat(
            "serve", "conductor", "--config", recipe, "--port", str(port), "--folder", str(tmp_path / "run")
        )
    assert refused.returncode == 1
    assert f"127.0.0.1:{port}" in refused.stderr
    assert time.monotonic() - began < 2.0


def test_listening_on_a_network_must_be_asked_for_by_name() -> None:
    refused = offbeat("serve", "reward", "--join", "127.0.0.1:1", "--host", "0.0.0.0")
    assert refused.returncode == 2
    assert "--insecure-i-know" in refused.stderr
