"""docs/algorithms.md names every algorithm, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from trainer.advantages import AdvantageInputs, AdvantageOptions, estimator_of
from trainer.config import ADVANTAGE_ESTIMATORS, ESTIMATOR, POLICY_LOSSES, AlgorithmConfig
from trainer.configs.kl import KL_ALIASES, KL_ESTIMATORS
from trainer.configs.plugins import declares
from trainer.configs.update import AGGREGATIONS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """First column -> whole row, of the tables of a section."""
    section = PAGE.split(f"\n## {heading}")[1].split("\n## ")[0]
    return {line.split("`")[1]: line for line in section.splitlines() if line.startswith("| `")}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Advantage estimators", ADVANTAGE_ESTIMATORS),
        ("Policy losses", POLICY_LOSSES),
        ("Loss aggregation", AGGREGATIONS),
        ("The KL to the reference policy", [name for name in KL_ESTIMATORS if not name.endswith("+")]),
    ],
)
def test_every_name_has_a_row_and_every_row_is_one(heading: str, names: tuple[str, ...]) -> None:
    assert set(rows(heading)) == set(names)


def test_other_names_of_kl_estimators_stand_beside_them() -> None:
    assert {other: name for name, row in rows("The KL").items() for other in re.findall(r"\| `(\w+)` \|", row[3:])} == (
        KL_ALIASES
    )


def test_keys_that_are_named_exist() -> None:
    keys = {key for heading in ("Advantage", "Policy") for row in rows(heading).values() for key in keys_of(row)}
    assert len(keys) > 15 and keys - set(AlgorithmConfig.model_fields) == set()


def keys_of(row: str) -> list[str]:
    """Names in the column before the last."""
    return [name for name in re.findall(r"`(\w+)`", row.split(" | ")[2])]


def test_the_example_is_found_and_estimates(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (command,) = re.findall(r"adv_estimator=(\S+)", PAGE)
    (tmp_path / "advantages.py").write_text(code[0])
    target = str(tmp_path / command)
    config = AlgorithmConfig(adv_estimator=target)
    assert declares(target, ESTIMATOR, "needs_group")
    inputs = AdvantageInputs(
        token_rewards_BR=torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.5, 0.0]]),
        mask_BR=torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]),
        group_B=torch.tensor([5, 5, 6]),
    )
    found = estimator_of(config.adv_estimator)(inputs, AdvantageOptions())
    assert found.advantages_BR.tolist() == [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
