"""Which GPUs each service sees: in order, as asked, shared, or told that there are too few."""

from typing import Any

import pytest

from services.commands.placement import placement, visible_gpus
from services.config import Config
from services.errors import ConfigError

FOUR = ("0", "1", "2", "3")


def config(
    *,
    trainer: dict[str, Any] | None = None,
    push: dict[str, Any] | None = None,
    fleet: tuple[dict[str, Any], ...] = (),
    **launch: Any,
) -> Config:
    return Config.model_validate(
        {
            "model": "m",
            "run": {"name": "t", "num_steps": 1},
            "data": {},
            "rollout": {"model": "m"},
            "reward": {"functions": [{"target": "arithmetic"}]},
            "trainer": {"model": "m"} | (trainer or {}),
            "push": push or {},
            "launch": launch | {"fleet": fleet},
        }
    )


def problem(config: Config, visible: tuple[str, ...] = FOUR) -> str:
    with pytest.raises(ConfigError) as error:
        placement(config, visible)
    return "\n".join(error.value.problems)


def test_the_trainer_comes_first_and_each_server_has_its_own() -> None:
    assert placement(config(rollout_servers=3), FOUR) == {
        "trainer": "0",
        "rollout-0": "1",
        "rollout-1": "2",
        "rollout-2": "3",
    }


def test_what_the_parent_sees_is_what_is_shared_out() -> None:
    found = placement(config(rollout_servers=1, trainer_ranks=2), ("5", "GPU-ab", "7"))
    assert found == {"trainer": "5,GPU-ab", "rollout-0": "7"}


def test_a_reference_looks_on_with_the_trainer() -> None:
    with_reference = config().model_copy(update={"reference": config().reference.model_copy(update={"enabled": True})})
    assert placement(with_reference, FOUR)["reference-0"] == "0"


def test_too_few_are_shared_unless_somebody_has_counted_on_them() -> None:
    assert placement(config(rollout_servers=4), FOUR) == {}
    assert placement(config(), ()) == {}
    assert "takes 5 GPUs (2 trainer + 1 rollout-0 + 1 rollout-1 + 1 rollout-2) and this box has 4" in problem(
        config(rollout_servers=3, trainer_ranks=2)
    )


def test_a_device_that_is_said_is_left_alone() -> None:
    assert placement(config(trainer={"device": "cpu"}), FOUR) == {"rollout-0": "0"}
    assert "trainer" not in placement(config(trainer={"device": "cuda:1"}), FOUR)


def test_one_card_for_all() -> None:
    assert placement(config(rollout_servers=2, gpus={"trainer": [0], "rollout": [0]}), ("3",)) == {
        "trainer": "3",
        "rollout-0": "3",
        "rollout-1": "3",
    }


def test_a_service_goes_before_its_role_and_who_is_not_named_sees_all() -> None:
    found = placement(config(rollout_servers=2, gpus={"rollout": [1, 2], "rollout-1": [3]}), FOUR)
    assert found == {"rollout-0": "1", "rollout-1": "3"}


def test_an_empty_list_keeps_a_service_off_the_gpus() -> None:
    assert placement(config(gpus={"rollout": [], "trainer": [2]}), FOUR) == {"trainer": "2", "rollout-0": ""}


def test_what_cannot_be_is_told() -> None:
    assert "launch.gpus.rollout: no GPU 4, 7: this box has 4" in problem(config(gpus={"rollout": [4, 7]}))
    assert "launch.gpus.rolout: no such role or service in this run; there are reward" in problem(
        config(gpus={"rolout": [0]})
    )
    assert "launch.gpus.rollout: 2 GPUs for 3 services: 1 to share, or 3" in problem(
        config(rollout_servers=3, gpus={"rollout": [0, 1]})
    )


def test_the_parents_own_setting_bounds_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-1a")
    assert visible_gpus() == ("2", "GPU-1a")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


def test_who_shares_is_placed_on_the_first_cards_however_many_there_are() -> None:
    assert placement(config(rollout_servers=2, share_gpu=True), FOUR) == {
        "trainer": "0",
        "rollout-0": "0",
        "rollout-1": "0",
    }
    assert placement(config(share_gpu=True), ()) == {}
    assert "launch.share_gpu: trainer takes 3 GPUs and this box has 2" in problem(
        config(share_gpu=True, trainer_ranks=3), ("0", "1")
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"share_gpu": True, "gpus": {"trainer": [0]}}, "launch.share_gpu and launch.gpus both place services"),
        ({"time_sharing": True}, "run.max_staleness=2 would let one run ahead"),
        ({"time_sharing": True}, "launch.time_sharing with trainer.offload=none"),
        ({"time_sharing": True, "push": {"mode": "rolling"}}, "launch.time_sharing with push.mode=rolling"),
        (
            {"time_sharing": True, "fleet": ({"engine": "vllm"},)},
            "the engine vllm sleeps only with vllm.enable_sleep_mode",
        ),
    ],
)
def test_what_cannot_be_shared_is_told(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config(**changes)
