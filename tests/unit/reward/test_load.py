"""Targets of a config: what is found, under which version, and what the error says when it is not."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from reward.adapt import adapt
from reward.function import RewardError, ScoreItem
from reward.functions import FUNCTIONS
from reward.load import configure, load, read_source

ITEM = ScoreItem(prompt="q", response="so 72", ground_truth="72", data_source="gsm8k", extra={"level": "3"})

VERL = '''
"""A reward file as verl users write it."""
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    found = re.findall(r"[0-9]+", solution_str)
    right = bool(found) and found[-1] == ground_truth
    return {"score": right, "level": float(extra_info["level"]), "source": data_source, "bonus": kwargs.get("bonus", 0)}


async def later(solution_str, ground_truth):
    return solution_str.endswith(ground_truth)


def native(item, *, scale=1.0):
    return scale * len(item.response)


def batch(solution_strs, ground_truths):
    return [0.0 for _ in solution_strs]


class Grader:
    def __call__(self, item):
        return 0.5


grader = Grader()
number = 3
SELF_TEST = [({"response": "so 72", "ground_truth": "72", "extra": {"level": "1"}}, 1.0)]
'''


@pytest.fixture
def verl_file(tmp_path: Path) -> Path:
    file = tmp_path / "compute_score.py"
    file.write_text(VERL)
    return file


def test_a_built_in_is_found_by_its_name_and_may_be_renamed() -> None:
    assert load("gsm8k") == FUNCTIONS["gsm8k"]
    assert load("gsm8k", name="correct").name == "correct"


def test_a_verl_function_is_called_by_keyword_and_its_notes_are_left_out(verl_file: Path) -> None:
    spec = load(f"{verl_file}:compute_score")
    assert spec.function(ITEM) == {"score": 1.0, "level": 3.0, "bonus": 0}
    assert configure(spec, {"bonus": 2.0}).function(ITEM) == {"score": 1.0, "level": 3.0, "bonus": 2.0}


async def test_an_async_verl_function_with_fewer_parameters_works_as_well(verl_file: Path) -> None:
    pending = load(f"{verl_file}:later").function(ITEM)
    assert not isinstance(pending, (float, int))
    assert await pending == 1.0  # type: ignore[misc]


def test_the_version_of_a_file_is_the_start_of_its_hash(verl_file: Path) -> None:
    spec = load(f"{verl_file}:native")
    assert spec.version == hashlib.sha256(VERL.encode()).hexdigest()[:12]
    assert spec.self_test[0][0].response == "so 72"


def test_a_file_is_loaded_under_a_private_name_and_leaves_no_bytecode(verl_file: Path) -> None:
    load(f"{verl_file}:native")
    assert "compute_score" not in sys.modules
    assert list(verl_file.parent.iterdir()) == [verl_file]


def test_the_bytes_that_were_read_count_and_not_what_the_file_holds_later(verl_file: Path) -> None:
    source = read_source(f"{verl_file}:native")
    verl_file.write_text("raise RuntimeError('edited')")
    assert load(f"{verl_file}:native", source=source).function(ITEM) == 5.0


def test_other_parameters_are_another_version() -> None:
    plain, scaled = load("length"), configure(load("length"), {"factor": 2.0})
    assert plain.version == "1"
    assert scaled.version.startswith("1+")
    assert scaled.version != configure(load("length"), {"factor": 3.0}).version
    assert configure(load("length"), {}) == plain


def test_any_callable_object_will_do(verl_file: Path) -> None:
    assert load(f"{verl_file}:grader").function(ITEM) == 0.5


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("gsm8k_flexibel", r"no reward function 'gsm8k_flexibel'.*offbeat\.rewards.*nearest: gsm8k_flexible"),
        ("os.system", "no reward function 'os.system'"),
        ("{dir}/compute_scor.py:f", r"no file 'compute_scor\.py'.*nearest: compute_score\.py"),
        ("{dir}/none/x.py:f", "no file 'x.py'.*there is: nothing"),
        ("{file}:compute", "has no function 'compute'.*nearest: compute_score"),
        ("{file}", r"names a file but no function: write compute_score\.py:function"),
        ("{file}:number", "neither a function nor a RewardSpec"),
        ("{file}:batch", r"batch\(solution_strs, ground_truths\) is no reward function: write batch\(item"),
    ],
)
def test_an_unknown_target_is_an_error_that_teaches(verl_file: Path, target: str, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        load(target.format(file=verl_file, dir=verl_file.parent))


def test_a_file_that_does_not_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with pytest.raises(RewardError, match=r"broken\.py does not load: ModuleNotFoundError: No module named"):
        load(f"{tmp_path}/broken.py:f")


@pytest.mark.parametrize("samples", ["[1]", "[({'respons': 'x'}, 1.0)]", "[({'response': 'x'}, 'high')]"])
def test_self_test_samples_of_a_wrong_shape_are_refused(tmp_path: Path, samples: str) -> None:
    (tmp_path / "f.py").write_text(f"def f(item): return 1.0\nSELF_TEST = {samples}\n")
    with pytest.raises(RewardError, match=r"SELF_TEST of f\.py"):
        load(f"{tmp_path}/f.py:f")


def test_an_unknown_parameter_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RewardError, match=r"length takes no parameter 'factr'; .*nearest: factor"):
        configure(load("length"), {"factr": 1.0})
    with pytest.raises(RewardError, match=r"arithmetic takes no parameter 'factr'; there is: nothing"):
        configure(load("arithmetic"), {"factr": 1.0})


def test_a_function_that_takes_no_item_is_refused() -> None:
    with pytest.raises(RewardError, match="is no reward function"):
        adapt(lambda: 1.0, name="f")


def test_an_entry_point_is_found_with_the_version_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "house_rewards-2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-rewards\nVersion: 2.3\n")
    (info / "entry_points.txt").write_text("[offbeat.rewards]\npolite = house_rewards:polite\nodd = house_rewards:no\n")
    (tmp_path / "house_rewards.py").write_text("def polite(item): return float('please' in item.response)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = load("polite")
    assert (spec.name, spec.version, spec.function(ITEM)) == ("polite", "2.3", 0.0)
    with pytest.raises(RewardError, match="entry point 'odd' does not load"):
        load("odd")


def test_the_room_and_its_worker_import_nothing_heavy() -> None:
    code = "import sys, reward.worker; print(sorted({'torch', 'numpy', 'pydantic', 'asyncio'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
    code = "import sys, reward.scorer; print(sorted({'torch', 'numpy', 'grpc', 'transformers'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
