"""Logs, events and metrics: one set-up, fixed sentences, facts as fields."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import IO, Any

# What moves a cursor, breaks a line or turns the reading direction.
HIDDEN = (*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
CONTROL = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in HIDDEN}
IN_TRACEBACKS = {code: text for code, text in CONTROL.items() if code != 0x0A}


class Console(logging.Formatter):
    """`12:00:01 rollout-0 listening address=127.0.0.1:5000`; control characters are escaped."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{key}={value}" for key, value in getattr(record, "facts", {}).items())
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {self.service} {level}{record.getMessage()} {facts}".rstrip().translate(CONTROL)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info).translate(IN_TRACEBACKS)
        return line


def set_up_logging(service: str, *, folder: Path | None = None, level: str = "INFO", console: bool = True) -> None:
    """Send the logs of this process to the console and to `folder`/logs/<service>.log."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)] if console else []
    if folder is not None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(folder / "logs" / f"{service}.log"))
    for handler in handlers:
        handler.setFormatter(Console(service))
    logging.basicConfig(level=level, handlers=handlers, force=True)
    logging.captureWarnings(True)
    # Libraries tell every file they touch at INFO; their warnings are enough.
    for noisy in ("httpx", "filelock", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLevelName(level)))


class JsonLines:
    """Append JSON objects to a file, one a line, flushed at once; safe to reopen after a crash."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
