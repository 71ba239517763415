"""Named places where a test may break a process on purpose; a no-op unless OFFBEAT_FAULTS holds a plan.

    OFFBEAT_FAULTS='rollout-1:push.begin@3=kill, trainer:step.computed@7=kill'

Each entry is service:point@nth=action; nth counts passes of the process, or is the step at points of a step; nth+ is
that pass and every later one.
Actions: kill (SIGKILL to itself), stop (SIGSTOP), hang (block the loop for a minute), or any other word, which `fault`
returns to the place that asked. What fires is written to the file OFFBEAT_FAULTS_LOG first, so that a test can
prove it; an entry fires once in the life of that file, however often the process is restarted, and one with + always.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

_ENTRY = re.compile(r"\s*([\w.-]+):([\w.]+)@(\d+)(\+?)=(\w+)\s*")
_plan: dict[tuple[str, str, int], str] = {}
_lasting: dict[tuple[str, str], tuple[int, str]] = {}
"""Service and point -> (first pass, action)."""
_passed: dict[tuple[str, str], int] = {}


def arm(text: str) -> None:
    """Load a plan; ValueError for an entry that does not parse."""
    _plan.clear()
    _lasting.clear()
    _passed.clear()
    for entry in filter(None, text.split(",")):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"fault {entry!r} is not service:point@nth=action")
        service, point, nth, onwards, action = match.groups()
        if onwards:
            _lasting[service, point] = (int(nth), action)
        else:
            _plan[service, point, int(nth)] = action


def fault(service: str, point: str, *, step: int = 0) -> str:
    """Pass a place (for `step`, where it belongs to one); returns the planned word, or an empty string."""
    if not _plan and not _lasting:
        return ""
    count = _passed[service, point] = _passed.get((service, point), 0) + 1
    nth = step or count
    action = _plan.get((service, point, nth), "")
    if not action or not note(f"{service}:{point}@{nth}={action}"):
        action = lasting(service, point, nth)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if action == "hang":
        time.sleep(60)
    return action


def lasting(service: str, point: str, nth: int) -> str:
    """The action that holds from some pass on, if this one is among them."""
    first, action = _lasting.get((service, point), (nth + 1, ""))
    if nth < first:
        return ""
    note(f"{service}:{point}@{first}+={action}")
    return action


def note(line: str) -> bool:
    """Write what fires; False where it fired before."""
    name = os.environ.get("OFFBEAT_FAULTS_LOG", "")
    if not name:
        return True
    path = Path(name)
    if path.exists() and line in path.read_text().splitlines():
        return False
    with path.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    return True


arm(os.environ.get("OFFBEAT_FAULTS", ""))
