"""On-policy distillation: the teacher's grades by hand, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.compose import load_config
from services.errors import ConfigError
from tests.e2e.kit import write_recipe
from trainer.advantages import AdvantageInputs, AdvantageOptions, estimator_of, reads_logprobs
from trainer.advantages.distillation import distillation
from trainer.config import AlgorithmConfig

INPUTS = AdvantageInputs(
    token_rewards_BR=torch.tensor([[0.0, 0.0, 1.0], [0.0, 3.0, 0.0]], dtype=torch.float64),
    mask_BR=torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.float64),
    group_B=torch.tensor([4, 4]),
    logprobs_BR=torch.tensor([[-1.0, -9.0, -2.0], [-0.5, -1.0, 0.0]], dtype=torch.float64),
    reference_logprobs_BR=torch.tensor([[-3.0, -1.0, -1.5], [-0.5, -0.25, 0.0]], dtype=torch.float64),
)


def test_a_token_is_graded_by_what_the_teacher_would_give_it_and_by_nothing_after_it() -> None:
    found = distillation(INPUTS, AdvantageOptions())
    assert found.advantages_BR.tolist() == [[-2.0, 0.0, 0.5], [0.0, 0.75, 0.0]]
    assert found.metrics == {"teacher_kl": pytest.approx((2.0 - 0.5 - 0.0 - 0.75) / 4)}
    assert torch.equal(found.returns_BR, found.advantages_BR)


def test_the_reward_of_the_task_is_added_less_its_groups_mean() -> None:
    found = distillation(INPUTS, AdvantageOptions(reward_weight=0.5))
    assert found.advantages_BR.tolist() == [[-2.5, 0.0, 0.0], [0.5, 1.25, 0.0]]
    alone = distillation(replace(INPUTS, group_B=torch.tensor([1, 2])), AdvantageOptions(reward_weight=0.5))
    assert alone.advantages_BR.tolist() == [[-1.5, 0.0, 1.0], [1.5, 2.25, 0.0]]


@pytest.mark.parametrize("missing", ["logprobs_BR", "reference_logprobs_BR"])
def test_it_needs_both_sides(missing: str) -> None:
    changes: dict[str, Any] = {missing: None}
    with pytest.raises(ValueError, match="serve it as the reference"):
        distillation(replace(INPUTS, **changes), AdvantageOptions())


def test_which_estimators_have_logprobs_computed_for_them() -> None:
    names = ("distillation", "optimal_token_baseline", "grpo")
    assert [reads_logprobs(name, estimator_of(name)) for name in names] == [True, True, False]

    def own(inputs: AdvantageInputs, options: AdvantageOptions) -> Any: ...

    assert not reads_logprobs("./mine.py:own", own)
    own.reads_logprobs = True  # type: ignore[attr-defined]
    assert reads_logprobs("./mine.py:own", own)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adv_estimator": "distillation", "kl_use": "loss", "kl_coef": 0.1}, "is the KL to the reference already"),
        ({"distillation_reward_weight": 0.1}, "does nothing without adv_estimator='distillation'"),
    ],
)
def test_settings_that_contradict_it_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**fields)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "reference.model is the start model, and adv_estimator=distillation learns from what another model says"),
        (("reference.model={folder}/./student",), "reference.model is the start model"),
        (("reference.model={folder}/nowhere",), "reference.model: no model folder at .*/nowhere"),
        (("reference.model={folder}/teacher", "run.dynamic_sampling=2"), "drops groups of equal reward"),
        (
            ("reference={{tiny: {{preset: gsm8k}}}}", "tiny={{preset: demo}}", "model=null"),
            "reference.tiny.preset=gsm8k has other tokens than tiny.preset=demo",
        ),
    ],
)
def test_a_teacher_that_is_none_is_refused(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, *overrides)


def test_the_teacher_is_asked_for_every_sample_and_may_be_made_on_the_spot(tmp_path: Path) -> None:
    config = load(tmp_path, "reference.model={folder}/teacher")
    assert config.use_reference and config.models_to_make() == []
    config = load(tmp_path, "reference.tiny={{warm_start_steps: 9}}")
    assert config.reference.model == str(tmp_path / "outputs" / "run" / "teacher")
    assert [(tiny.warm_start_steps, folder.name) for tiny, folder in config.models_to_make()] == [(9, "teacher")]


def load(folder: Path, *overrides: str) -> Any:
    for name in ("student", "teacher"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text("{}")
    recipe = str(write_recipe(folder, model=folder / "student"))
    texts = [override.format(folder=folder) for override in overrides]
    return load_config(recipe, ["trainer.algorithm.adv_estimator=distillation", *texts])
