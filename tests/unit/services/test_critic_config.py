"""A critic that does not fit the rest of the run is told before anything starts."""

from pathlib import Path

import pytest

from services.compose import load_config
from tests.unit.services.test_compose import problems_of, recipe_file

GAE = ["trainer.algorithm.adv_estimator=gae", "trainer.critic={}"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (GAE[:1], "adv_estimator='gae' needs the values of a critic: add the section trainer.critic"),
        (GAE[1:], "adv_estimator='grpo' takes no values"),
        ([*GAE, "trainer.critic.minibatches=7"], "samples cannot be cut into trainer.critic.minibatches=7"),
        ([*GAE, "trainer.critic.warmup_steps=4"], "leaves none of run.num_steps=4 for the policy"),
        ([*GAE, "trainer.critic.model=/nowhere"], "/nowhere"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, overrides: list[str], expected: str) -> None:
    problems = problems_of(recipe_file(tmp_path), overrides)
    assert any(expected in problem for problem in problems), problems


def test_a_critic_of_half_the_settings_passes(tmp_path: Path) -> None:
    config = load_config(recipe_file(tmp_path), [*GAE, "trainer.critic.optimizer.lr=0.001"])
    assert config.trainer.critic is not None
    assert (config.trainer.critic.optimizer.lr, config.trainer.critic.optimizer.eps) == (0.001, 1e-8)
