"""Faults on purpose: they fire where and when planned, once in the life of their log, and never by default."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services import faults


@pytest.fixture(autouse=True)
def disarmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OFFBEAT_FAULTS_LOG", raising=False)
    yield
    faults.arm("")


def test_without_a_plan_nothing_happens() -> None:
    assert faults.fault("rollout-0", "push.begin") == ""


def test_a_fault_fires_at_its_service_point_and_pass_alone() -> None:
    faults.arm("rollout-0:push.begin@2=flip")
    assert faults.fault("rollout-0", "push.begin") == ""
    assert faults.fault("rollout-1", "push.begin") == ""
    assert faults.fault("rollout-0", "push.commit") == ""
    assert faults.fault("rollout-0", "push.begin") == "flip"
    assert faults.fault("rollout-0", "push.begin") == ""


def test_at_a_point_of_a_step_the_step_is_what_counts() -> None:
    faults.arm("trainer:step.computed@7=late")
    assert [faults.fault("trainer", "step.computed", step=step) for step in (6, 7)] == ["", "late"]


def test_a_plan_holds_many_faults() -> None:
    faults.arm(" a-1:x@1=one , a-1:y.z@1=two,")
    assert (faults.fault("a-1", "x"), faults.fault("a-1", "y.z")) == ("one", "two")


@pytest.mark.parametrize("text", ["a:b=kill", "a@1=kill", "a:b@x=kill", "a:b@1=", "nonsense"])
def test_a_plan_that_does_not_parse_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="is not service:point@nth=action"):
        faults.arm(text)


def test_what_fires_is_logged_and_fires_once_however_often_the_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "faults.log"
    monkeypatch.setenv("OFFBEAT_FAULTS_LOG", str(log))
    for expected in ("word", ""):
        faults.arm("a:b@1=word")
        assert faults.fault("a", "b") == expected
    assert log.read_text() == "a:b@1=word\n"


def test_kill_is_a_kill_and_is_logged_first(tmp_path: Path) -> None:
    log = tmp_path / "faults.log"
    environment = {**os.environ, "OFFBEAT_FAULTS": "a:b@1=kill", "OFFBEAT_FAULTS_LOG": str(log)}
    code = "from services.faults import fault; fault('a', 'b'); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert log.read_text() == "a:b@1=kill\n"


def test_a_fault_with_a_plus_fires_from_its_pass_on_and_is_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("OFFBEAT_FAULTS_LOG", str(log))
    faults.arm("rollout-0:rollout.reply@2+=shift, rollout-0:rollout.reply@3=liar")
    found = [faults.fault("rollout-0", "rollout.reply") for _ in range(4)]
    assert found == ["", "shift", "liar", "shift"]
    assert faults.fault("rollout-1", "rollout.reply") == ""
    assert log.read_text().split() == ["rollout-0:rollout.reply@2+=shift", "rollout-0:rollout.reply@3=liar"]
