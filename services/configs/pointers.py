"""`model: outputs/NAME/checkpoints/latest` stands for the checkpoint that this small file names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

POINTER = "latest"
ROOMS = ("rollout", "trainer", "reference")


def follow_pointers(values: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Puts the folder in the place of each pointer; gives the key and what is wrong with a pointer."""
    sections = [((room,), values[room]) for room in ROOMS if isinstance(values.get(room), dict)]
    for path, section in [((), values), *sections]:
        model = section.get("model")
        if not isinstance(model, str) or Path(model).name != POINTER or not Path(model).expanduser().is_file():
            continue
        pointer = Path(model).expanduser()
        folder = pointer.parent / pointer.read_text(encoding="ascii", errors="replace").strip()
        section["model"] = str(folder)
        if not (folder / "model.safetensors").is_file():
            yield (
                (*path, "model"),
                f"{folder} is no model by itself (several ranks or LoRA wrote it): offbeat export it",
            )
