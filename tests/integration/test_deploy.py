"""deploy/: the Dockerfile and compose.yaml say what they should, and the file's own commands train a model.

The schema of the Compose Specification comes with docker-compose, which `make setup` unpacks without installing it.
Containers become local processes: host names turn into 127.0.0.1, the one port into a free one for each service, the
volume into a folder.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_SCHEMA = ROOT / ".cache" / "compose" / "compose" / "config" / "compose_spec.json"
ROLES = {"conductor", "rollout", "reward", "reference", "trainer"}
HOME, PORT = "/home/offbeat", 50051
START_SECONDS, RUN_SECONDS = 90.0, 120.0
Words = list[tuple[str, str]]


def dockerfile() -> dict[str, Words]:
    """Stage -> its instructions, those of the stages that it is built on included."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    stages: dict[str, Words] = {}
    stage = ""
    for line in lines:
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            parent, stage = rest.split(" AS ")
            stages[stage] = list(stages.get(parent, [("FROM", parent)]))
        else:
            stages[stage].append((word, rest))
    return stages


def last(words: Words, word: str) -> str:
    return [rest for name, rest in words if name == word][-1]


def compose() -> dict[str, Any]:
    """The file with ${NAME:-default} filled in from the environment, as Compose does it."""
    text = (ROOT / "deploy" / "compose.yaml").read_text()
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: os.environ.get(match[1], match[2]), text)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


# What the files say.


@pytest.mark.parametrize("role", sorted(ROLES))
def test_every_role_has_an_image_that_runs_it_as_an_ordinary_user(role: str) -> None:
    words = dockerfile()[role]

    assert json.loads(last(words, "ENTRYPOINT")) == ["offbeat", "serve", role]
    assert last(words, "USER").split(":")[0] not in ("root", "0")
    assert words[0][1].startswith("python:3.12.")
    assert json.loads(last(words, "HEALTHCHECK").split(" CMD ")[1])[1:] == [
        "-m",
        "services.probe",
        f"127.0.0.1:{last(words, 'EXPOSE')}",
    ]


def test_images_hold_the_whole_package_and_install_only_extras_that_exist() -> None:
    stages = dockerfile()
    copied = [rest.split()[:-1] for word, rest in stages["wheel"] if word == "COPY"]
    paths = [path for sources in copied for path in sources]
    extras = set(re.findall(r"\)\[(\w+)\]", str(stages)))

    assert all((ROOT / path).exists() for path in paths)
    assert set(project()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= {p.split("/")[0] for p in paths}
    assert extras == {"train", "reward"} <= set(project()["project"]["optional-dependencies"])


def test_the_builder_gets_everything_that_the_dockerfile_copies() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [rest.split()[:-1] for word, rest in dockerfile()["wheel"] if word == "COPY"]

    assert {path for sources in copied for path in sources} <= allowed


@pytest.mark.parametrize("role", ["conductor", "reward"])
def test_services_without_a_model_come_without_torch(role: str) -> None:
    assert not [rest for word, rest in dockerfile()[role] if word == "RUN" and ("torch" in rest or "train" in rest)]


def test_the_compose_file_is_valid_against_the_compose_specification() -> None:
    schema = json.loads(COMPOSE_SCHEMA.read_text())

    jsonschema.Draft7Validator(schema).validate(compose())


def test_every_container_is_confined() -> None:
    file = compose()

    assert file["networks"]["wire"] == {"internal": True}
    for service in file["services"].values():
        assert service["init"] and service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"] and service["user"].split(":")[0] not in (
            "0",
            "root",
        )
        assert service["networks"] == ["wire"] and "ports" not in service and "privileged" not in service


def test_every_service_is_built_from_a_target_that_exists_and_shares_one_run_folder() -> None:
    stages, services = dockerfile(), compose()["services"]

    assert {service["build"]["target"] for service in services.values()} == ROLES
    for service in services.values():
        assert last(stages[service["build"]["target"]], "WORKDIR") == HOME
        assert all(re.fullmatch(rf"runs:{HOME}/outputs(:ro)?", volume) for volume in service.get("volumes", []))


# What the file does.


class Box:
    """The services of the compose file as processes of this machine."""

    def __init__(self, folder: Path, processes: ExitStack) -> None:
        self.folder = folder
        self.services = compose()["services"]
        self.ports = dict(zip(self.services, free_ports(len(self.services)), strict=True))
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._processes = processes
        self._stages = dockerfile()

    def up(self) -> None:
        """Start every service as soon as what it depends on is as the file wants it."""
        waiting = dict(self.services)
        deadline = time.monotonic() + START_SECONDS
        while waiting:
            for name in [name for name, service in waiting.items() if self._may_start(service)]:
                self._start(name, waiting.pop(name))
            assert time.monotonic() < deadline, f"not started in time: {list(waiting)}\n{self.told()}"
            time.sleep(0.2)

    def _may_start(self, service: dict[str, Any]) -> bool:
        conditions = {name: needed["condition"] for name, needed in service.get("depends_on", {}).items()}
        return all(self._is(name, condition) for name, condition in conditions.items())

    def _is(self, name: str, condition: str) -> bool:
        process = self.running.get(name)
        if process is None:
            return False
        code = process.poll()
        assert not code, f"{name} ended with {code}\n{self.told()}"
        if condition == "service_completed_successfully":
            return code == 0
        assert condition == "service_healthy" and code is None
        kind, _, *words = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        command = [sys.executable, "-P", *(word.replace(f":{PORT}", f":{self.ports[name]}") for word in words)]
        return subprocess.run(command, cwd=self.folder, check=False, capture_output=True).returncode == 0

    def _start(self, name: str, service: dict[str, Any]) -> None:
        image = json.loads(last(self._stages[service["build"]["target"]], "ENTRYPOINT"))
        words: list[str] = service.get("entrypoint", image) + service["command"]
        assert words[0] == "offbeat"
        command = [sys.executable, "-P", "-m", "services.cli", *(self._here(name, word) for word in words[1:])]
        settings = {key: value.replace("/tmp", str(self.folder)) for key, value in service["environment"].items()}
        environment = {**os.environ, **settings, "OMP_NUM_THREADS": "1"}
        self.running[name] = self._processes.enter_context(
            process(command, cwd=self.folder, env=environment, log=self.folder / f"{name}.out")
        )

    def _here(self, name: str, word: str) -> str:
        """The word with this machine's address for host names and the service's own port."""
        key, _, value = word.partition("=")
        host, _, port = value.partition(":")
        if word == f"--port={PORT}":
            return f"--port={self.ports[name]}"
        if key == "--name" or host not in {*self.services, "0.0.0.0"}:
            return word
        return f"{key}=127.0.0.1" + (f":{self.ports[host]}" if port else "")

    def told(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.out")))


@contextmanager
def process(command: list[str], *, cwd: Path, env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        running = subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def small_recipe(path: Path) -> None:
    """The demo, three steps long and without its warm start."""
    recipe = yaml.safe_load((ROOT / "deploy" / "recipes" / "demo.yaml").read_text())
    recipe["tiny"]["warm_start_steps"] = 0
    recipe["run"] |= {"num_steps": 3, "prompts_per_step": 4, "group_size": 4}
    recipe["rollout"]["max_num_seqs"] = 32
    path.write_text(yaml.safe_dump(recipe))


def unexplained(metrics: Path) -> set[str]:
    """Names of metrics that docs/metrics.md leaves out."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    names = {name for line in metrics.read_text().splitlines() for name in json.loads(line)}
    return {name for name in names if f"`{name}`" not in text and not name.startswith("staleness_count_")}


@pytest.mark.slow
def test_the_commands_of_the_compose_file_train_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_recipe(tmp_path / "small.yaml")
    monkeypatch.setenv("OFFBEAT_RECIPE", str(tmp_path / "small.yaml"))

    with ExitStack() as processes:
        box = Box(tmp_path, processes)
        box.up()
        deadline = time.monotonic() + RUN_SECONDS
        for name, running in box.running.items():
            try:
                assert running.wait(timeout=deadline - time.monotonic()) == 0, f"{name} failed\n{box.told()}"
            except subprocess.TimeoutExpired:
                pytest.fail(f"{name} did not end\n{box.told()}")

    summary = json.loads((tmp_path / "outputs" / "demo" / "summary.json").read_text())
    events = [json.loads(line) for line in (tmp_path / "outputs" / "demo" / "events.jsonl").read_text().splitlines()]
    assert summary["steps"] == 3
    assert summary["ledger"]["balanced"] and summary["ledger"]["trained"] == 3 * 4 * 4
    assert {event["service"] for event in events if event["kind"] == "joined"} == box.services.keys() - {
        "model",
        "conductor",
    }
    assert not [event for event in events if event["kind"] == "lost"]
    assert unexplained(tmp_path / "outputs" / "demo" / "metrics.jsonl") == set()
