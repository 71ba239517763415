"""Who is started on this box: role, name, Python and own settings of every service of a run.

An engine may live in an environment of its own (vLLM and SGLang cannot share one): `launch.python` and
`launch.fleet` say which Python runs what.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.compose import is_executable
from services.config import Config
from services.configs.launch import Role
from services.errors import ConfigError

PACKAGES = {"vllm": "vllm", "sglang": "sglang"}
"""What an engine needs beside Offbeat itself."""
SETUP = {
    "vllm": "run make setup-vllm (vLLM's build for CPUs),",
    "sglang": "install offbeat[train,sglang] in an environment .venv-sglang",
}
PROBE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """One service to start. `overrides` change its own section, `threads` of 0 leave torch's own number."""

    role: str
    name: str
    python: str
    threads: int = 1
    ranks: int = 1
    """Processes that make up the service (torchrun)."""
    overrides: tuple[str, ...] = ()


def lineup(config: Config) -> list[Post]:
    """Every service of a run, the conductor first. ConfigError where an engine has no environment here."""
    launch = config.launch
    counts: dict[Role, int] = {
        "conductor": 1,
        "trainer": 1,
        "reward": launch.reward_servers,
        "reference": launch.reference_servers if config.use_reference else 0,
    }
    threads = {"trainer": config.trainer.threads, "reference": config.reference.threads}
    plain = [
        Post(
            role=role,
            name=role if role in ("conductor", "trainer") else f"{role}-{index}",
            python=absolute(launch.python.get(role, sys.executable)),
            threads=threads.get(role, 1),
            ranks=launch.trainer_ranks if role == "trainer" else 1,
        )
        for role, count in counts.items()
        for index in range(count)
    ]
    return plain[:2] + list(rollout_posts(config)) + plain[2:]


def rollout_posts(config: Config) -> Iterator[Post]:
    """The rollout servers: those of the section rollout, then launch.fleet, numbered through."""
    index = 0
    for member in config.fleet:
        settings = config.rollout_of(member)
        shared = config.launch.python.get("rollout") if settings.engine == config.rollout.engine else None
        python = interpreter(settings.engine, member.python or shared)
        for _ in range(member.count):
            yield Post(
                role="rollout",
                name=f"rollout-{index}",
                python=python,
                threads=settings.threads or 0,
                overrides=tuple(written(member.settings(), "rollout")),
            )
            index += 1


def written(settings: Mapping[str, object], prefix: str) -> Iterator[str]:
    """Nested settings as `a.b=c` overrides."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from written(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}={json.dumps(value)}"


def interpreter(engine: str, asked: str | None) -> str:
    """The Python for a rollout server: what was asked, else this one, else that of .venv-ENGINE; else ConfigError."""
    if asked is not None:
        return absolute(asked)
    if has_engine(engine):
        return sys.executable
    for home in (Path.cwd(), Path(sys.prefix).parent):
        python = home / f".venv-{engine}" / "bin" / "python"
        if is_executable(python):
            return str(python)
    raise ConfigError(
        [
            f"the engine {engine} is not installed here: {SETUP.get(engine, '')} or set launch.python.rollout to the"
            " Python of an environment that has it"
        ]
    )


def has_engine(engine: str) -> bool:
    """Whether this Python could run the engine."""
    return engine not in PACKAGES or importlib.util.find_spec(PACKAGES[engine]) is not None


def check_interpreters(posts: list[Post]) -> None:
    """ConfigError where an environment of a service does not hold Offbeat; this one does."""
    for python in sorted({post.python for post in posts} - {sys.executable}):
        command = [python, "-P", "-c", "import services.serve"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        if done.returncode:
            why = (done.stderr.splitlines() or ["it said nothing"])[-1]
            raise ConfigError([f"{python} cannot run a service ({why}): install offbeat there too"])


def absolute(python: str) -> str:
    """The path as it is: a link in a virtual environment must stay one."""
    return os.path.abspath(os.path.expanduser(python))
