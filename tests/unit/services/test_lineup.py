"""Who is started: names, Pythons and own settings of the services of a run."""

import sys
from pathlib import Path

import pytest

from services.commands import lineup as room
from services.commands.lineup import Post, check_interpreters, interpreter, lineup
from services.compose import load_config
from services.config import Config
from services.errors import ConfigError

KL = ("trainer.algorithm.kl_use=loss", "trainer.algorithm.kl_coef=0.1", "reference.enabled=false")
FLEET = "[{count: 2, rollout: {max_num_seqs: 4, threads: 3}}, {engine: hf, python: %s}]"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A link to this Python, as a virtual environment has one."""
    link = tmp_path / "other" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to(sys.executable)
    return link


def config_of(*overrides: str) -> Config:
    return load_config("demo", overrides)


def test_every_service_runs_in_this_python_unless_it_is_told_otherwise(python: Path) -> None:
    posts = lineup(config_of(f"launch.python.reward={python}", "launch.rollout_servers=1"))
    assert [(post.name, post.python) for post in posts] == [
        ("conductor", sys.executable),
        ("trainer", sys.executable),
        ("rollout-0", sys.executable),
        ("reward-0", str(python)),
        ("reference-0", sys.executable),
    ]
    assert {post.overrides for post in posts} == {()}
    assert [post.role for post in posts] == ["conductor", "trainer", "rollout", "reward", "reference"]


def test_a_fleet_follows_the_plain_servers_with_its_own_settings_and_python(python: Path) -> None:
    config = config_of("launch.rollout_servers=1", f"launch.fleet={FLEET % python}")
    posts = [post for post in lineup(config) if post.role == "rollout"]
    own = ("rollout.max_num_seqs=4", "rollout.threads=3")
    assert [(post.name, post.overrides, post.threads, post.python) for post in posts] == [
        ("rollout-0", (), 1, sys.executable),
        ("rollout-1", own, 3, sys.executable),
        ("rollout-2", own, 3, sys.executable),
        ("rollout-3", ('rollout.engine="hf"',), 1, str(python)),
    ]


def test_a_run_may_have_a_fleet_alone() -> None:
    posts = lineup(config_of("launch.rollout_servers=0", "launch.fleet=[{count: 2}]"))
    assert [post.name for post in posts if post.role == "rollout"] == ["rollout-0", "rollout-1"]


def test_nested_settings_are_written_as_overrides() -> None:
    settings = {"dtype": "float32", "sampling": {"top_p": 1e-6, "stop": ["a b"]}, "max_model_len": None}
    assert list(room.written(settings, "rollout")) == [
        'rollout.dtype="float32"',
        "rollout.sampling.top_p=1e-06",
        'rollout.sampling.stop=["a b"]',
        "rollout.max_model_len=null",
    ]


def test_an_engine_that_is_not_here_is_looked_for_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(room.PACKAGES, "rare", "no_such_package")
    monkeypatch.setitem(room.SETUP, "rare", "run make setup-rare,")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the engine rare is not installed here: run make setup-rare, or set"):
        interpreter("rare", None)
    python = tmp_path / ".venv-rare" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    with pytest.raises(ConfigError):
        interpreter("rare", None)
    python.chmod(0o755)
    assert interpreter("rare", None) == str(python)
    assert interpreter("rare", "bin/other") == str(tmp_path / "bin" / "other")
    assert interpreter("hf", None) == sys.executable


def test_a_python_without_offbeat_is_told_before_anything_starts(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'services'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    check_interpreters([Post(role="reward", name="reward-0", python=sys.executable)])
    with pytest.raises(ConfigError, match=r"cannot run a service \(ModuleNotFoundError: No module named 'services'\)"):
        check_interpreters([Post(role="reward", name="reward-0", python=str(bare))])


@pytest.mark.parametrize(
    ("overrides", "count"),
    [((), 1), (("trainer.lora.rank=4",), 0), (("trainer.lora.rank=4", "reference.enabled=true"), 1)],
)
def test_an_adapter_that_can_be_switched_off_is_its_own_reference(overrides: tuple[str, ...], count: int) -> None:
    config = config_of(*KL, *overrides)
    assert [post.role for post in lineup(config)].count("reference") == count


def test_a_named_reference_has_a_service_beside_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert config_of(*KL, "trainer.lora.rank=4", f"reference.model={tmp_path}").use_reference
