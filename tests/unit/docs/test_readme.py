"""What README.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "README.md").read_text()


def named_in_the_tree() -> list[str]:
    """Paths of the tree under "The house"; a first column may name several files of its folder."""
    tree = TEXT.split("## The house")[1].split("```")[1].strip("\n")
    paths, folder = [], ""
    for line in tree.splitlines():
        first = re.split(r"\s{2,}|(?<=/) ", line.strip())[0]
        if not line.startswith(" "):
            folder = first
        words = [word for word in first.split() if word.endswith(("/", ".py"))]
        paths += [folder] if not line.startswith(" ") else [folder + word for word in words]
    return paths


def test_what_the_tree_names_is_there() -> None:
    paths = named_in_the_tree()

    assert len(paths) > 50 and [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == []


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)

    assert len(links) > 10 and [link for link in links if not (ROOT / link).is_file()] == []


def test_make_targets_that_are_shown_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert set(re.findall(r"make ([a-z-]+)\b(?= {2}|`|$| TORCH)", TEXT, re.MULTILINE)) <= targets


def test_the_recipes_that_are_listed_are_the_recipes_that_there_are() -> None:
    recipes = ROOT / "deploy" / "recipes"
    listed = set(re.findall(r"^\| `(\w+)\.yaml`", (recipes / "README.md").read_text(), re.MULTILINE))

    assert listed == {path.stem for path in recipes.glob("*.yaml")}
