"""docs/configuration.md says what the schemas say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_of_settings_has_not_drifted_from_the_schemas() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]

    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_page_that_differs_is_told(tmp_path: Path) -> None:
    script = tmp_path / "generate.py"
    script.write_text((ROOT / "docs" / "generate.py").read_text())
    (tmp_path / "configuration.md").write_text("an old page")

    done = subprocess.run([sys.executable, str(script), "--check"], check=False, capture_output=True, text=True)

    assert done.returncode == 1 and "has drifted" in done.stdout
