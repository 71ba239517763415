"""What a push sends has to be what the engines hold, and is told before anything starts."""

from pathlib import Path

import pytest

from services.commands.candidate import compose
from services.compose import load_config
from services.pushes.dtypes import dtype_problem
from tests.unit.services.test_compose import problems_of, recipe_file

MIXED = ["trainer.dtype=bfloat16", "rollout.dtype=float32"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            MIXED,
            "rollout servers hold float32 (rollout.dtype), a push would send bfloat16 (push.dtype=auto,"
            " trainer.dtype=bfloat16), and engines do not cast: set push.dtype=float32",
        ),
        (["rollout.dtype=float32", "push.dtype=float16"], "engines do not cast: set push.dtype=float32"),
        (["launch.fleet=[{rollout: {dtype: bfloat16}}]"], "engines do not cast: set push.dtype=bfloat16"),
        (
            ["rollout.dtype=float32", "launch.fleet=[{rollout: {dtype: bfloat16}}]"],
            "rollout servers hold bfloat16 and float32, and a push sends one dtype: give all the same rollout.dtype",
        ),
    ],
)
def test_engines_that_could_take_no_push_are_told(tmp_path: Path, overrides: list[str], expected: str) -> None:
    problems = problems_of(recipe_file(tmp_path), overrides)
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize(
    "overrides",
    [[*MIXED, "push.dtype=float32"], ["trainer.dtype=bfloat16", "rollout.dtype=bfloat16"], ["trainer.dtype=bfloat16"]],
)
def test_what_fits_or_is_not_known_yet_passes(tmp_path: Path, overrides: list[str]) -> None:
    load_config(recipe_file(tmp_path), overrides)


def test_the_checkpoints_own_dtype_counts_where_it_is_known() -> None:
    assert "set push.dtype=bfloat16" in dtype_problem(["bfloat16", None], push="auto", trainer="float32")
    assert dtype_problem(["bfloat16", "bfloat16"], push="bfloat16", trainer="float32") == ""
    assert dtype_problem([None], push="auto", trainer="float32") == ""


@pytest.mark.parametrize("override", ["rollout.dtype=bfloat16", "+rollout.dtype=bfloat16"])
def test_an_evaluation_pushes_nothing_and_takes_any_dtype(tmp_path: Path, override: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = compose(
        str(tmp_path),
        recipe=recipe_file(tmp_path),
        data=None,
        reward=None,
        engine=None,
        overrides=["tiny=null", override],
    )
    assert config.rollout.dtype == "bfloat16"
