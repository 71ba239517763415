"""How a bench reports: one JSON file with the machine, the figures and the command that made them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "device": device,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def command() -> str:
    """The command as anyone types it: without the place of the program and of the report."""
    words = sys.argv[1:]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return " ".join(("offbeat", *words))


def write(out: Path | None, name: str, figures: dict[str, Any]) -> int:
    """Print the figures and, where asked, keep them."""
    record = {"bench": name, "command": command(), "machine": machine(), **figures}
    text = json.dumps(record, indent=2)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    return 0


def spread(values: list[float], *, digits: int = 4) -> dict[str, float]:
    """min, median and max."""
    return {
        "min": round(min(values), digits),
        "median": round(statistics.median(values), digits),
        "max": round(max(values), digits),
    }
