"""`offbeat data`: sources to files that a run reads, with a report."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path


def convert_gsm8k(source: Path, out: Path) -> int:
    """Write train.parquet, test.parquet and report.json; print what was kept and what was refused."""
    from rollout.datasets.gsm8k import convert

    try:
        report = convert(source, out)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({split: asdict(part) for split, part in report.items()}, indent=2))
    return 0
