"""The trainer's config: what it refuses, and how it says so."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from trainer.config import AlgorithmConfig, CheckpointConfig, TrainerConfig
from trainer.configs.update import OptimizerConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adv_estimator": "grp"}, "did you mean 'grpo'.*existing: grpo, grpo_passk, gdpo, rloo"),
        ({"adv_estimator": "gdpo"}, "gdpo_weights are the parts of the reward.*set both or neither"),
        ({"gdpo_weights": {"a": 1.0}}, "set both or neither"),
        ({"adv_estimator": "gdpo", "gdpo_weights": {"a": float("nan")}}, "finite"),
        (
            {"adv_estimator": "gdpo", "gdpo_weights": {"a": 1.0}, "kl_use": "reward", "kl_coef": 0.1},
            "looks at the parts of the reward only",
        ),
        ({"gamma": 0.9}, "gamma=0.9 does nothing with adv_estimator='grpo'"),
        ({"loss": "decopled"}, "did you mean 'decoupled'"),
        ({"kl_use": "loss"}, "set kl_coef > 0"),
        ({"kl_coef": 0.1}, "set kl_use to"),
        ({"kl_use": "reward", "kl_coef": 0.1, "kl_estimator": "k3+"}, "drop the \\+"),
        ({"old_logprobs": "behaviour"}, "set old_logprobs='proximal'"),
        ({"loss_scale_factor": 8}, "seq-mean-token-sum-norm"),
        ({"kl_target": 0.1}, "set kl_use='reward'"),
        (
            {"kl_use": "both", "kl_coef": 0.1, "kl_loss_coef": 0.1},
            "twice, by its reward and by its loss.*kl_twice=true",
        ),
        ({"kl_use": "both", "kl_coef": 0.1, "kl_twice": True}, "has two weights: set kl_coef"),
        ({"kl_use": "both", "kl_twice": True, "kl_loss_coef": 0.1}, "does nothing with kl_coef=0"),
        ({"kl_use": "loss", "kl_coef": 0.1, "kl_twice": True}, "do nothing without kl_use='both'"),
        ({"kl_use": "loss", "kl_coef": 0.1, "kl_loss_coef": 0.1}, "do nothing without kl_use='both'"),
        ({"kl_estimator": "full"}, "needs whole distributions"),
        ({"kl_estimator": "k4"}, "unknown KL estimator 'k4'; existing: k1, k2"),
        ({"loss": "bypass", "old_logprobs": "proximal"}, "set old_logprobs='behaviour'"),
        ({"loss": "bypass", "correction": {"second_moment": 0.04}}, "looks at the whole batch"),
        ({"loss": "bypass", "correction": {"weights": "token"}}, "a ratio that corrects already"),
        ({"bypass_loss": "reinforce"}, "does nothing: set loss='bypass'"),
        ({"clip_cov_low": 5.0}, "must be below clip_cov_high"),
        ({"loss": "dro"}, "set both or neither"),
        ({"dro_beta": 0.1}, "set both or neither"),
        ({"clip_lo": 0.1}, "Extra inputs"),
    ],
)
def test_an_algorithm_that_does_not_hold_together_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (False, False, 0.0)),
        ({"kl_use": "loss", "kl_coef": 0.2}, (False, True, 0.2)),
        ({"kl_use": "reward", "kl_coef": 0.2}, (True, False, 0.0)),
        ({"kl_use": "both", "kl_twice": True, "kl_coef": 0.2, "kl_loss_coef": 0.1}, (True, True, 0.1)),
    ],
)
def test_where_the_kl_goes_and_with_which_weight(fields: dict[str, Any], expected: tuple[bool, bool, float]) -> None:
    found = AlgorithmConfig(**fields)
    assert (found.kl_in_reward, found.kl_in_loss, found.kl_loss_weight) == expected


def test_bypass_implies_the_behaviour_policy_and_survives_a_round_trip() -> None:
    found = AlgorithmConfig(loss="bypass")
    assert found.old_logprobs == "behaviour"
    assert AlgorithmConfig(**found.model_dump()) == found


@pytest.mark.parametrize(("name", "meant"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl+", "k3+"), ("abs+", "abs+")])
def test_kl_estimators_are_known_by_their_other_names(name: str, meant: str) -> None:
    assert AlgorithmConfig(kl_estimator=name).kl_estimator == meant


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "cosine"}, "needs total_steps"),
        ({"min_lr_ratio": 0.1}, "does nothing with schedule='constant'"),
        ({"schedule": "linear", "total_steps": 5, "warmup_steps": 5}, "must exceed"),
        ({"betas": (0.9, 1.0)}, "must lie in"),
    ],
)
def test_an_optimizer_that_does_not_hold_together_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(**fields)


def test_every_field_says_what_it_means() -> None:
    for section in (AlgorithmConfig, OptimizerConfig, CheckpointConfig, TrainerConfig):
        assert [name for name, field in section.model_fields.items() if not field.description] == []


def test_the_config_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, trainer.config; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
