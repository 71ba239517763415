"""Logs and JSON lines: one line a record, whatever a model or a user has put into it."""

import json
import logging
import sys
from pathlib import Path

import pytest

from services.telemetry import Console, JsonLines, set_up_logging


def line(message: str, *, level: int = logging.INFO, **facts: object) -> str:
    record = logging.LogRecord("offbeat", level, __file__, 1, message, None, None)
    record.facts = facts
    return Console("rollout-0").format(record)


def test_a_line_has_clock_service_sentence_and_facts() -> None:
    text = line("listening", address="127.0.0.1:5000")
    clock, rest = text.split(" ", 1)
    assert len(clock) == 8 and clock.count(":") == 2
    assert rest == "rollout-0 listening address=127.0.0.1:5000"


def test_a_warning_says_so() -> None:
    assert " rollout-0 warning: slow" in line("slow", level=logging.WARNING)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a\\x0ab"),
        ("a\r\tb", "a\\x0d\\x09b"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x00\x7f\x9b", "\\x00\\x7f\\x9b"),
        ("user\u202etxt", "user\\u202etxt"),
        ("\u2066x\u2069", "\\u2066x\\u2069"),
        ("a\u2028b\u2029c", "a\\u2028b\\u2029c"),
        ("\u00e9\u4e2d", "\u00e9\u4e2d"),
    ],
)
def test_what_would_move_the_cursor_or_the_reading_direction_is_escaped(text: str, shown: str) -> None:
    assert line("said", text=text).endswith(f"said text={shown}")
    assert line(text).endswith(shown)


def test_a_traceback_keeps_its_lines_and_nothing_else() -> None:
    try:
        raise ValueError("a model said \x1b[2J\u202e")
    except ValueError:
        record = logging.LogRecord("offbeat", logging.ERROR, __file__, 1, "failed", None, sys.exc_info())
    text = Console("rollout-0").format(record)
    assert text.splitlines()[0].endswith("rollout-0 error: failed")
    assert text.endswith("ValueError: a model said \\x1b[2J\\u202e")


def test_json_lines_are_one_a_record_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    for number in range(2):
        file = JsonLines(path)
        file.write({"number": number, "text": "a\nb\x1b"})
        file.close()
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    assert rows == [{"number": number, "text": "a\nb\x1b"} for number in range(2)]


def test_logs_go_to_the_run_folder(tmp_path: Path) -> None:
    before = logging.getLogger().handlers[:]
    try:
        set_up_logging("trainer", folder=tmp_path, console=False)
        logging.getLogger("services.x").info("step", extra={"facts": {"step": 1}})
        assert (tmp_path / "logs" / "trainer.log").read_text().endswith(" trainer step step=1\n")
    finally:
        for handler in logging.getLogger().handlers[:]:
            handler.close()
            logging.getLogger().removeHandler(handler)
        for handler in before:
            logging.getLogger().addHandler(handler)
        logging.captureWarnings(False)
