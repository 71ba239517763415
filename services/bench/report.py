"""How a bench reports: one JSON file with the machine, the figures and the command that made them."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "vllm", "sglang")


def machine() -> dict[str, Any]:
    """What the figures were measured on; no GPU is touched."""
    gpus = gpu_names()
    return {
        "device": gpus[0] if gpus else platform.processor() or platform.machine(),
        "gpus": len(gpus),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := version_of(name))},
    }


def gpu_names() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    ask = [program, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=20.0, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def version_of(package: str) -> str:
    """Of an installed package; empty where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def command() -> str:
    """The command as anyone types it: without the place of the program and of the report."""
    words = sys.argv[1:]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return " ".join(("offbeat", *words))


def write(out: Path | None, name: str, figures: dict[str, Any]) -> int:
    """Print the figures and, where asked, keep them."""
    print(keep(out, name, figures))
    return 0


def keep(out: Path | None, name: str, figures: dict[str, Any]) -> str:
    """Write what is known so far, so that an end by force loses nothing; returns the text."""
    text = json.dumps({"bench": name, "command": command(), "machine": machine(), **figures}, indent=2)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    return text


def spread(values: list[float], *, digits: int = 4) -> dict[str, float]:
    """min, median and max."""
    return {
        "min": round(min(values), digits),
        "median": round(statistics.median(values), digits),
        "max": round(max(values), digits),
    }


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; share 0 to 1."""
    ranked = sorted(values)
    return ranked[max(math.ceil(share * len(ranked)) - 1, 0)]


def ranks(values: list[float], *, digits: int = 3) -> dict[str, float]:
    """min, p50, p90 and max."""
    shares = {"min": 0.0, "p50": 0.5, "p90": 0.9, "max": 1.0}
    return {name: round(percentile(values, share), digits) for name, share in shares.items()}
