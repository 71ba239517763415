"""Estimators and losses of the user's own: how they are found, checked, loaded, and what is told where they are not."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from services.compose import load_config, load_json
from services.errors import ConfigError
from tests.e2e.kit import write_recipe
from trainer.advantages import AdvantageInputs, AdvantageOptions, AdvantageOutputs, estimator_of, has_token_baseline
from trainer.config import CHECKED, ESTIMATOR, AlgorithmConfig
from trainer.configs.plugins import PluginError, declares
from trainer.losses import LossOutputs, learns_without_advantage, loss_of

GOOD = """
from trainer.advantages import AdvantageOutputs

def centred(inputs, options):
    advantages_BR = (inputs.token_rewards_BR - inputs.token_rewards_BR.mean()) * inputs.mask_BR
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)

centred.needs_group = True

def by_token(inputs, options, scale=2.0):
    return AdvantageOutputs(advantages_BR=inputs.mask_BR, returns_BR=inputs.mask_BR)

by_token.token_baseline = True

def bare(inputs, options):
    return inputs.mask_BR

def narrow(inputs):
    return inputs.mask_BR

number = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def some_inputs() -> AdvantageInputs:
    return AdvantageInputs(
        token_rewards_BR=torch.tensor([[1.0], [3.0]]), mask_BR=torch.ones(2, 1), group_B=torch.tensor([0, 0])
    )


def test_a_function_in_a_file_is_found_without_running_it_and_then_estimates(mine: Path) -> None:
    mine.write_text(f"import sys\nsys.ran_{mine.stem} = True\n{GOOD}")
    name = AlgorithmConfig(adv_estimator=f"{mine}:centred").adv_estimator
    assert not hasattr(sys, f"ran_{mine.stem}")
    estimator = estimator_of(name)
    found = estimator(some_inputs(), AdvantageOptions())
    assert found.advantages_BR.tolist() == [[-1.0], [1.0]]
    assert "mine" not in sys.modules and hasattr(sys, f"ran_{mine.stem}")
    delattr(sys, f"ran_{mine.stem}")


def test_what_an_estimator_needs_is_said_by_attributes_and_is_nothing_by_default(mine: Path) -> None:
    traits = {
        name: (
            declares(f"{mine}:{name}", ESTIMATOR, "needs_group"),
            has_token_baseline(f"{mine}:{name}", estimator_of(f"{mine}:{name}")),
        )
        for name in ("centred", "by_token", "bare")
    }
    assert traits == {"centred": (True, False), "by_token": (False, True), "bare": (False, False)}
    assert not declares(f"{mine}.gone.py:centred", ESTIMATOR, "needs_group")
    assert has_token_baseline("optimal_token_baseline", estimator_of("optimal_token_baseline"))


def test_a_loss_says_that_it_learns_without_advantage(tmp_path: Path) -> None:
    path = tmp_path / "losses.py"
    path.write_text("def a(inputs, options): ...\ndef b(inputs, options): ...\nb.learns_without_advantage = True\n")
    found = {name: learns_without_advantage(name, loss_of(name)) for name in (f"{path}:a", f"{path}:b", "dro", "gpg")}
    assert list(found.values()) == [False, True, True, False]
    with pytest.raises(PluginError, match=f"losses.py:a gave NoneType; it has to give {LossOutputs.__name__}"):
        loss_of(f"{path}:a")(None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("grp", r"unknown advantage estimator 'grp'; did you mean 'grpo'\? existing: grpo, grpo_passk"),
        ("{folder}/mine.py", "names a file but no function: write .*mine.py:function"),
        ("{folder}/mine.py:", "write .*mine.py:function"),
        ("{folder}/mime.py:centred", r"no file 'mime.py' in .*did you mean 'mine.py'\? existing: mine.py"),
        ("{folder}/nowhere/mine.py:centred", "no file 'mine.py' in .*existing: nothing"),
        (
            "{folder}/mine.py:centered",
            r"mine.py has no function 'centered'; did you mean 'centred'\? existing: centred, by_token, bare, narrow",
        ),
        ("{folder}/broken.py:f", "broken.py:2: is not Python"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_what_there_is(mine: Path, target: str, message: str) -> None:
    name = target.format(folder=mine.parent)
    (mine.parent / "broken.py").write_text("x = 1\ndef f(:\n") if "broken" in target else None
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig(adv_estimator=name)
    assert AlgorithmConfig.model_validate({"adv_estimator": name}, context=CHECKED).adv_estimator == name


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("narrow", r"narrow takes \(inputs\); write it as \(inputs, options\) -> AdvantageOutputs"),
        ("number", "number is int, not a function"),
    ],
)
def test_a_function_with_other_arguments_is_refused_when_it_is_loaded(mine: Path, function: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        estimator_of(f"{mine}:{function}")


def test_a_function_that_gives_something_else_is_told_at_its_first_call(mine: Path) -> None:
    with pytest.raises(PluginError, match=f"bare gave Tensor; it has to give {AdvantageOutputs.__name__}"):
        estimator_of(f"{mine}:bare")(some_inputs(), AdvantageOptions())


def test_a_file_that_breaks_while_it_loads_is_told(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text("import torch_of_tomorrow\ndef f(inputs, options): ...\n")
    with pytest.raises(PluginError, match=r"breaks.py does not load: ModuleNotFoundError: .*torch_of_tomorrow"):
        estimator_of(f"{tmp_path}/breaks.py:f")
    assert not [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == "breaks.py"]


@pytest.fixture
def installed(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package as pip leaves it: sources, and metadata that names an entry point."""
    metadata = mine.parent / "somebody-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[offbeat.advantages]\nsomebodys = somebody.mine:centred\n")
    (mine.parent / "somebody").mkdir()
    (mine.parent / "somebody" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    mine.rename(mine.parent / "somebody" / "mine.py")
    monkeypatch.syspath_prepend(str(mine.parent))


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_found_by_its_metadata_alone(mine: Path) -> None:
    assert AlgorithmConfig(adv_estimator="somebodys").adv_estimator == "somebodys"
    assert declares("somebodys", ESTIMATOR, "needs_group")
    with pytest.raises(ValidationError, match="unknown policy loss 'somebodys'"):
        AlgorithmConfig(loss="somebodys")
    with pytest.raises(ValidationError, match=r"did you mean 'somebodys'.*existing: grpo.*somebodys"):
        AlgorithmConfig(adv_estimator="somebody")
    with pytest.raises(PluginError, match="entry point 'somebodys' does not load: RuntimeError: imported"):
        estimator_of("somebodys")
    (mine.parent / "somebody" / "__init__.py").write_text("")
    assert estimator_of("somebodys")(some_inputs(), AdvantageOptions()).returns_BR.tolist() == [[-1.0], [1.0]]
    for name in ("somebody", "somebody.mine"):
        del sys.modules[name]


def test_a_run_is_checked_with_the_users_estimator(mine: Path, tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, model=tmp_path))
    (tmp_path / "config.json").write_text("{}")

    def load(function: str, group_size: int) -> Any:
        return load_config(
            recipe, [f"trainer.algorithm.adv_estimator={mine}:{function}", f"run.group_size={group_size}"]
        )

    assert load("centred", 4).rules().min_group_samples == 2
    config = load("bare", 1)
    assert config.rules().min_group_samples == 1
    with pytest.raises(ConfigError, match=r"run.group_size=1 leaves nothing to compare with: .*centred needs at least"):
        load("centred", 1)
    with pytest.raises(ConfigError, match=r"trainer.algorithm.adv_estimator: mine.py has no function 'gone'"):
        load("gone", 4)
    mine.unlink()  # another machine of the run
    assert load_json(config.model_dump_json()).trainer.algorithm.adv_estimator == f"{mine}:bare"
