"""Write the Python twins of the .proto files, or check that they have not drifted.

    python protos/generate.py           write protos/generated/
    python protos/generate.py --check   exit 1 and name what differs

The generator runs in a virtual environment of its own, so that the twins are made by the same old tool everywhere:
code from grpcio-tools 1.71.2 runs on protobuf 5.29 and all later ones, code from newer tools refuses older runtimes.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
GENERATED = HERE / "generated"
TOOLS = ("grpcio-tools==1.71.2", "mypy-protobuf==3.7.0", "protobuf==5.29.6", "setuptools<81")
TOOL_HOME = HERE.parent / ".cache" / "protoc"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 where a twin differs")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "generated"
        write_twins(fresh)
        if check:
            return report(drifted(fresh))
        shutil.rmtree(GENERATED, ignore_errors=True)
        shutil.copytree(fresh, GENERATED)
    return 0


def write_twins(folder: Path) -> None:
    """Run protoc over all sources into `folder` and make the imports absolute."""
    folder.mkdir(parents=True)
    sources = sorted(path.name for path in HERE.glob("*.proto"))
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    python = tool_python()
    command = [str(python), "-m", "grpc_tools.protoc", f"-I{HERE}", *outputs, *sources]
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    (folder / "__init__.py").write_text('"""Twins of the .proto files, written by protos/generate.py."""\n')
    for twin in folder.glob("*_pb2*.py*"):
        twin.write_text(absolute_imports(twin.read_text()))


def absolute_imports(text: str) -> str:
    """protoc writes `import x_pb2`; inside a package it must be `from protos.generated import x_pb2`."""
    return re.sub(r"^import (\w+_pb2)(?: as (\w+))?$", absolute_import, text, flags=re.MULTILINE)


def absolute_import(match: re.Match[str]) -> str:
    name, alias = match.groups()
    return f"from protos.generated import {name}" + (f" as {alias}" if alias else "")


def tool_python() -> Path:
    """The Python that holds the generator; its environment is made once."""
    python = TOOL_HOME / "bin" / "python"
    if not (TOOL_HOME / "ready").exists():
        venv.create(TOOL_HOME, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *TOOLS], check=True)
        (TOOL_HOME / "ready").touch()
    return python


def drifted(fresh: Path) -> list[str]:
    names = {path.name for folder in (fresh, GENERATED) for path in folder.glob("*.py*")}
    return sorted(name for name in names if not same(fresh / name, GENERATED / name))


def same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and filecmp.cmp(one, other, shallow=False)


def report(names: list[str]) -> int:
    for name in names:
        print(f"protos/generated/{name} has drifted from its source: run python protos/generate.py")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
