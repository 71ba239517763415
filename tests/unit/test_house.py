"""The rules of the house, held by walking its sources: who may import whom, what stays small, what is never called."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor

from protos.generated import (
    conductor_pb2,
    control_pb2,
    reference_pb2,
    reward_pb2,
    rollout_pb2,
    telemetry_pb2,
    trainer_pb2,
    trajectory_pb2,
    weights_pb2,
)

HOME = Path(__file__).resolve().parents[2]
ROOMS = ("trainer", "rollout", "reward")
FLOORS = (*ROOMS, "services", "protos", "deploy", "tests")
CONFIGS = (
    *(str(path.relative_to(HOME)) for room in ROOMS for path in sorted((HOME / room).rglob("config.py"))),
    *(str(path.relative_to(HOME)) for path in sorted((HOME / "trainer/configs").glob("*.py"))),
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SHAPELESS_NAMES = {"utils", "util", "misc", "common", "helpers", "helper", "stuff", "tools"}
NEVER_IMPORTED = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
NEVER_CALLED = {"eval", "exec", "__import__"}
NEVER_CALLED_OF = {
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("numpy", "load"),
    ("np", "load"),
    ("os", "system"),
}
NEVER_NAMED = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "allow_pickle"}
FILES = [
    path
    for floor in FLOORS
    for path in sorted((HOME / floor).rglob("*.py"))
    if "generated" not in path.parts and "__pycache__" not in path.parts
]
PROTOS = sorted((HOME / "protos").glob("*.proto"))
DESCRIPTORS: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (
        conductor_pb2,
        control_pb2,
        reference_pb2,
        reward_pb2,
        rollout_pb2,
        telemetry_pb2,
        trainer_pb2,
        trajectory_pb2,
        weights_pb2,
    )
]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def tops_of(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(tree_of(path))}


def told(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(HOME)}:{getattr(node, 'lineno', 1)}"


def test_there_is_a_house_to_walk_through() -> None:
    assert len(FILES) > 100
    assert {"trainer/config.py", "rollout/config.py", "reward/config.py"} < set(CONFIGS)
    assert {descriptor.name for descriptor in DESCRIPTORS} == {path.name for path in PROTOS}


# Who may import whom.


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_no_other_room_no_grpc_and_no_services(room: str) -> None:
    forbidden = (set(ROOMS) - {room}) | {"grpc", "grpc_health", "grpc_reflection", "services", "deploy", "tests"}
    wrong = {str(path): tops_of(path) & forbidden for path in FILES if path.is_relative_to(HOME / room)}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_the_ground_floor_imports_nothing_that_stands_on_it() -> None:
    forbidden = {*ROOMS, "services", "deploy", "tests"}
    wrong = {path.name: tops_of(path) & forbidden for path in FILES if path.is_relative_to(HOME / "protos")}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_imports_pydantic_and_configs_only(config: str) -> None:
    configs = {path.removesuffix(".py").replace("/", ".") for path in CONFIGS}
    tops = {name.partition(".")[0] for name in set(imports_of(tree_of(HOME / config))) - configs}
    assert tops - set(sys.stdlib_module_names) <= {"pydantic"}


def test_no_product_file_imports_a_test() -> None:
    product = [path for path in FILES if not path.is_relative_to(HOME / "tests")]
    assert [path for path in product if tops_of(path) & {"tests", "pytest", "hypothesis", "unittest"}] == []


# What stays small and has a name.


def test_no_file_is_long() -> None:
    long = {str(path): lines for path in FILES if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert long == {}


def test_no_function_is_long() -> None:
    long = [
        f"{told(path, node)} {node.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_file_or_folder_has_a_shapeless_name() -> None:
    names = {part for path in FILES for part in (*path.relative_to(HOME).parts[:-1], path.stem)}
    assert names & SHAPELESS_NAMES == set()


def test_every_file_says_what_it_is() -> None:
    silent = [path for path in FILES if ast.get_docstring(tree_of(path)) is None]
    assert silent == []


def test_sources_are_ascii() -> None:
    assert [path for path in [*FILES, *PROTOS] if not path.read_bytes().isascii()] == []


# What is never done.


def test_nothing_is_unpickled_or_evaluated() -> None:
    assert [line for path in FILES for line in forbidden_in(path)] == []


def forbidden_in(path: Path) -> Iterator[str]:
    tree = tree_of(path)
    for name in imports_of(tree):
        if name.partition(".")[0] in NEVER_IMPORTED:
            yield f"{path}: imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NEVER_CALLED:
            yield f"{told(path, node)} calls {node.func.id}"
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value), node.attr) in NEVER_CALLED_OF:
            yield f"{told(path, node)} names {ast.unparse(node)}"
        if isinstance(node, ast.Attribute) and node.attr in NEVER_NAMED:
            yield f"{told(path, node)} names {node.attr}"
        if isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} & NEVER_NAMED:
            yield f"{told(path, node)} imports one of {NEVER_NAMED}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield f"{told(path, node.value)} allows pickles"


def test_the_walk_finds_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.HOME", tmp_path)
    path = tmp_path / "bad.py"
    path.write_text(
        "import pickle\nfrom torch.distributed import broadcast_object_list\nimport torch, yaml\n"
        "torch.load('x')\nyaml.load('x')\neval('1')\nexec('1')\ntorch.distributed.all_gather_object([], 1)\n"
        "model.eval()\nyaml.safe_load('x')\n"
    )
    assert len(list(forbidden_in(path))) == 7


def test_nothing_is_left_undone() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
    here = Path(__file__)
    left = [path for path in FILES if path != here and marks.search(path.read_text())]
    assert left == []


def test_no_error_is_swallowed_without_a_word() -> None:
    silent = [
        told(path, node)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body)
    ]
    assert silent == []


# The language.


@pytest.mark.parametrize("path", PROTOS, ids=[path.name for path in PROTOS])
def test_every_field_and_call_of_the_wire_says_what_it_means(path: Path) -> None:
    lines = path.read_text().splitlines()
    declaration = re.compile(r"^\s*(rpc \w+\(|(repeated |optional )?(map<[^>]*>|[\w.]+) \w+ = \d+;)")
    silent = [
        f"{path.name}:{number}: {line.strip()}"
        for number, line in enumerate(lines, start=1)
        if declaration.match(line) and "//" not in line and not is_explained(lines, number - 1)
    ]
    assert silent == []


def is_explained(lines: list[str], index: int) -> bool:
    """A comment stands on the line above."""
    return lines[index - 1].strip().startswith("//")


def test_the_language_is_one_package() -> None:
    assert {descriptor.package for descriptor in DESCRIPTORS} == {"offbeat.v1"}


def test_enums_begin_with_the_unspecified() -> None:
    for descriptor in DESCRIPTORS:
        for name, enum in descriptor.enum_types_by_name.items():
            prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()
            assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"
            assert all(value.name.startswith(f"{prefix}_") for value in enum.values)


def test_no_message_holds_itself_and_none_holds_anything() -> None:
    for descriptor in DESCRIPTORS:
        for message in descriptor.message_types_by_name.values():
            assert not is_recursive(message, ())
            assert all(inner.full_name != "google.protobuf.Any" for inner in inner_messages(message))


def is_recursive(message: Descriptor, above: tuple[str, ...]) -> bool:
    if message.full_name in above:
        return True
    return any(is_recursive(inner, (*above, message.full_name)) for inner in inner_messages(message))


def inner_messages(message: Descriptor) -> list[Descriptor]:
    return [field.message_type for field in message.fields if field.message_type is not None]
