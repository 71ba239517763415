"""A bad config is told whole, at start, with place and key; a good one is what its YAML and overrides say."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.compose import RECIPES, load_config, load_json, override_section
from services.config import Config
from services.errors import ConfigError
from services.supervised.compose import is_supervised, load_sft_config
from trainer.config import ADVANTAGE_ESTIMATORS

RECIPE = """\
tiny:
  preset: demo
run:
  name: test
  num_steps: 4
  prompts_per_step: 4
  group_size: 4
data:
  type: arithmetic
rollout:
  max_num_seqs: 32
  max_model_len: 32
reward:
  functions:
    - target: arithmetic
    - target: length
      weight: 0.5
trainer:
  optimizer:
    lr: 1e-3
"""
# (what is wrong, lines that replace others in RECIPE or overrides, the message without the folder)
IN_FILE = [
    ("unknown section", ("run:", "runn:"), "r.yaml:3: runn: unknown key; did you mean run?"),
    ("unknown key", ("num_steps", "num_stps"), "r.yaml:5: run.num_stps: unknown key; did you mean run.num_steps?"),
    ("unknown nested key", ("lr:", "learning:"), "r.yaml:20: trainer.optimizer.learning: unknown key"),
    (
        "unknown key of a list item",
        ("weight:", "wieght:"),
        "r.yaml:17: reward.functions.1.wieght: unknown key; did you mean reward.functions.1.weight?",
    ),
    ("unknown key of tiny", ("preset:", "presett:"), "r.yaml:2: tiny.presett: unknown key; did you mean tiny.preset?"),
    ("nothing near", ("max_model_len", "zzzz"), "r.yaml:12: rollout.zzzz: unknown key"),
    (
        "text for a number",
        ("num_steps: 4", "num_steps: four"),
        "r.yaml:5: run.num_steps: Input should be a valid integer",
    ),
    (
        "a fraction of a step",
        ("num_steps: 4", "num_steps: 4.5"),
        "r.yaml:5: run.num_steps: Input should be a valid integer",
    ),
    (
        "no steps",
        ("num_steps: 4", "num_steps: 0"),
        "r.yaml:5: run.num_steps: Input should be greater than or equal to 1",
    ),
    (
        "a list for a number",
        ("num_steps: 4", "num_steps: [4]"),
        "r.yaml:5: run.num_steps: Input should be a valid integer",
    ),
    ("null for a number", ("num_steps: 4", "num_steps:"), "r.yaml:5: run.num_steps: Input should be a valid integer"),
    ("a value for a section", ("  preset: demo", "  7"), "r.yaml:1: tiny: Input should be a valid dictionary"),
    ("a value for a list", ("name: test", "name: [a]"), "r.yaml:4: run.name: Input should be a valid string"),
    ("a slash in the name", ("name: test", "name: a/b"), "r.yaml:4: run.name: String should match pattern"),
    ("unknown preset", ("preset: demo", "preset: huge"), "r.yaml:2: tiny.preset: Input should be 'demo', 'gsm8k'"),
    ("unknown source", ("type: arithmetic", "type: web"), "r.yaml:9: data.type: Input should be 'arithmetic', 'gsm8k'"),
    ("missing key", ("  num_steps: 4\n", ""), "r.yaml:3: run.num_steps: is required"),
    ("missing section", ("data:\n  type: arithmetic\n", ""), "r.yaml:1: data: is required"),
    ("no start model", ("tiny:\n  preset: demo\n", ""), "r.yaml:8: rollout.model: is required"),
    ("no reward", ("    - target: arithmetic\n    - target: length\n      weight: 0.5", "    []"), "at least 1 item"),
    ("an empty target", ("target: length", "target: ''"), "r.yaml:16: reward.functions.1.target: String should have"),
    (
        "a reward twice",
        ("target: length", "target: arithmetic"),
        "r.yaml:13: reward: functions named alike: arithmetic",
    ),
    ("a tab", ("run:", "run:\n\t"), "r.yaml:4: is not YAML: found character '\\t' that cannot start any token"),
    ("an open bracket", ("num_steps: 4", "num_steps: [4"), "r.yaml:6: is not YAML: "),
    ("a sentence", (RECIPE, "only words"), "r.yaml:1: expected keys and values, found str"),
    ("a list at the top", (RECIPE, "- a\n- b"), "r.yaml:1: expected keys and values, found list"),
    ("nothing at all", (RECIPE, ""), "r.yaml:1: run: is required"),
    (
        "a class to be made",
        ("num_steps: 4", "num_steps: !!python/object:os.system {}"),
        "r.yaml:5: is not YAML: could not",
    ),
]
BY_OVERRIDE = [
    ("unknown key", ["run.num_stps=3"], "run.num_stps=3: run.num_stps: unknown key; did you mean run.num_steps?"),
    ("unknown section", ["rum.seed=3"], "rum.seed=3: rum: unknown key; did you mean run?"),
    ("text for a number", ["--run.seed=x"], "--run.seed=x: run.seed: Input should be a valid integer"),
    (
        "below the bound",
        ["run.num_steps=0"],
        "run.num_steps=0: run.num_steps: Input should be greater than or equal to 1",
    ),
    ("no equals sign", ["run.num_steps"], "run.num_steps: an override is written key.path=value"),
    ("no key", ["=3"], "=3: an override is written key.path=value"),
    ("an empty part", ["run..seed=3"], "run..seed=3: an override is written key.path=value"),
    ("below a value", ["run.seed.deep=3", "run.name.x=3"], "run.name.x=3: name is a value, not a section"),
    (
        "below a list",
        ["reward.functions.0.weight=3"],
        "reward.functions.0.weight=3: functions is a value, not a section",
    ),
    ("bad YAML", ["run.name=[a"], "run.name=[a: the value is not YAML: "),
    ("a group of one", ["run.group_size=1"], "run.group_size=1: run.group_size=1 leaves nothing to compare with: grpo"),
    (
        "a batch that cannot be cut",
        ["trainer.algorithm.minibatches=3"],
        "r.yaml:6: run.prompts_per_step=4 x run.group_size=4 = 16 samples cannot be cut into trainer.algorithm.minib",
    ),
    (
        "a group larger than a server",
        ["run.group_size=65"],
        "run.group_size=65: run.group_size=65 is larger than twice rollout.max_num_seqs=32: a group would",
    ),
    (
        "a synchronous step larger than all servers",
        ["run.max_staleness=0", "run.prompts_per_step=17"],
        "run.max_staleness=0: run.max_staleness=0 needs the 68 samples of a step at once, and the rollout",
    ),
    (
        "two temperatures",
        ["trainer.algorithm.temperature=0.5"],
        "temperature=0.5: trainer.algorithm.temperature=0.5 differs",
    ),
    (
        "two token limits",
        ["trainer.algorithm.overlong={buffer: 2, limit: 9}"],
        "trainer.algorithm.overlong.limit=9 differs from rollout.sampling.max_tokens=",
    ),
    (
        "nothing to filter by",
        ["run.dynamic_sampling=1", "run.group_size=1", "trainer.algorithm.adv_estimator=reinforce"],
        "run.dynamic_sampling=1 with run.group_size=1",
    ),
    ("greedy", ["rollout.sampling.temperature=0"], "trainer.algorithm.temperature: Input should be greater than 0"),
    (
        "a part of the reward that nobody gives",
        ["trainer.algorithm.adv_estimator=gdpo", "trainer.algorithm.gdpo_weights={gms8k: 1}"],
        "trainer.algorithm.gdpo_weights names 'gms8k', and the reward functions are arithmetic, length: name one",
    ),
    ("unknown estimator", ["trainer.algorithm.adv_estimator=grop"], "did you mean 'grpo'?"),
    ("unknown loss", ["trainer.algorithm.loss=decouple"], "did you mean 'decoupled'?"),
    (
        "a KL that does nothing",
        ["trainer.algorithm.kl_coef=0.1"],
        "kl_coef=0.1: trainer.algorithm: kl_coef=0.1 does nothing",
    ),
    (
        "no file",
        ["data.type=file", "data.path=/nowhere/a.jsonl"],
        "data.path=/nowhere/a.jsonl: data.path: no such file",
    ),
    ("a source without path", ["data.type=gsm8k"], "r.yaml:8: data: type gsm8k needs one path"),
    (
        "no server",
        ["launch.rollout_servers=0"],
        "launch.rollout_servers=0: launch.rollout_servers=0 and no launch.fleet",
    ),
    (
        "a wrong setting of a fleet member",
        ["launch.fleet=[{rollout: {max_num_seqs: 0}}]"],
        "launch.fleet.0.rollout.max_num_seqs: Input should be greater than or equal to 1",
    ),
    (
        "an unknown setting of a fleet member",
        ["launch.fleet=[{rollout: {max_num_seq: 4}}]"],
        "launch.fleet.0.rollout.max_num_seq: Extra inputs are not permitted",
    ),
    (
        "an unknown engine of a fleet member",
        ["launch.fleet=[{engine: hg}]"],
        "launch.fleet.0.rollout.engine: Input should be 'hf'",
    ),
    (
        "sampling of a fleet member",
        ["launch.fleet=[{rollout: {sampling: {top_p: 0.5}}}]"],
        "launch.fleet.0.rollout.sampling: how samples are drawn is the run's: set rollout.sampling",
    ),
    (
        "a group larger than one of the servers",
        ["launch.fleet=[{rollout: {max_num_seqs: 1}}]"],
        "run.group_size=4 is larger than twice rollout.max_num_seqs=1: a group would never be leased",
    ),
    (
        "ranks that would share a card",
        ["launch.trainer_ranks=2", "trainer.device=cuda:1"],
        "launch.trainer_ranks=2 would all take trainer.device=cuda:1: set cuda",
    ),
    (
        "replicas that do not divide the ranks",
        ["launch.trainer_ranks=4", "trainer.parallel.replicas=3"],
        "trainer.parallel.replicas=3 does not divide launch.trainer_ranks=4",
    ),
    (
        "no such Python",
        ["launch.python.rollout=/nowhere/python"],
        "launch.python.rollout=/nowhere/python: launch.python.rollout: no such Python: /nowhere/python",
    ),
    (
        "no such Python of a fleet member",
        ["launch.fleet=[{python: /nowhere/python}]"],
        "launch.fleet.0.python: no such Python: /nowhere/python",
    ),
    (
        "a Python of a role that there is not",
        ["launch.python.rolout=/bin/sh"],
        "launch.python.rolout: Input should be 'conductor', 'rollout'",
    ),
    ("no model folder", ["tiny=null", "model=/nowhere/m"], "model=/nowhere/m: model: no model folder at /nowhere/m"),
    (
        "no model folder of one room",
        ["rollout.model=./nowhere", "tiny=null", "trainer.model=owner/hub"],
        "rollout.model=./nowhere: rollout.model: no model folder at ./nowhere",
    ),
]
GOOD = [
    (["run.num_steps=7"], "run.num_steps", 7),
    (["--run.num_steps=7"], "run.num_steps", 7),
    (["+run.num_steps=7"], "run.num_steps", 7),
    (["++run.num_steps=7"], "run.num_steps", 7),
    (["run.num_steps=7", "run.num_steps=8"], "run.num_steps", 8),
    (["data.shuffle=false"], "data.shuffle", False),
    (["data.shuffle=True"], "data.shuffle", True),
    (["trainer.optimizer.lr=1e-6"], "trainer.optimizer.lr", 1e-6),
    (["trainer.optimizer.lr=.5E-3"], "trainer.optimizer.lr", 5e-4),
    (["trainer.optimizer.betas=[0.9, 95e-2]"], "trainer.optimizer.betas", (0.9, 0.95)),
    (["trainer.optimizer.max_grad_norm=null"], "trainer.optimizer.max_grad_norm", None),
    (["trainer.optimizer.max_grad_norm=~"], "trainer.optimizer.max_grad_norm", None),
    (['run.name="123"'], "run.name", "123"),
    (["run.name='1e5'"], "run.name", "1e5"),
    (["run.name=nan"], "run.name", "nan"),
    (["run.folder=a=b"], "run.folder", "a=b"),
    (['rollout.sampling.stop=["\\n", "Q:"]'], "rollout.sampling.stop", ("\n", "Q:")),
    (["rollout.sampling.stop=[]"], "rollout.sampling.stop", ()),
    (["push.transport=disk"], "push.transport", "disk"),  # a section that the file does not have
    (["rollout.sampling.temperature=0.7"], "trainer.algorithm.temperature", 0.7),  # said once, holds for both
    (
        ["rollout.sampling.max_tokens=7", "trainer.algorithm.overlong={buffer: 2}"],
        "trainer.algorithm.overlong.limit",
        7,
    ),
    (["reward.functions=[{target: length, parameters: {scale: 1.5e-3}}]"], "reward.num_workers", 1),
]


def recipe_file(folder: Path, text: str = RECIPE) -> str:
    path = folder / "r.yaml"
    path.write_text(text)
    return str(path)


def problems_of(recipe: str, overrides: list[str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides or [])
    return caught.value.problems


@pytest.mark.parametrize(("change", "expected"), [case[1:] for case in IN_FILE], ids=[case[0] for case in IN_FILE])
def test_a_mistake_in_the_file_is_told_with_file_line_and_key(
    tmp_path: Path, change: tuple[str, str], expected: str
) -> None:
    assert change[0] in RECIPE
    problems = problems_of(recipe_file(tmp_path, RECIPE.replace(*change, 1)))
    assert any(expected in problem for problem in problems), problems
    assert all(problem.startswith(f"{tmp_path}/r.yaml:") for problem in problems), problems


@pytest.mark.parametrize(
    ("overrides", "expected"), [case[1:] for case in BY_OVERRIDE], ids=[case[0] for case in BY_OVERRIDE]
)
def test_a_mistake_in_an_override_names_the_override(tmp_path: Path, overrides: list[str], expected: str) -> None:
    problems = problems_of(recipe_file(tmp_path), overrides)
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize(("overrides", "key", "value"), GOOD, ids=[" ".join(case[0]) for case in GOOD])
def test_an_override_sets_what_it_says(tmp_path: Path, overrides: list[str], key: str, value: object) -> None:
    found: object = load_config(recipe_file(tmp_path), overrides)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value and type(found) is type(value)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = RECIPE.replace("num_steps: 4", "num_steps: none").replace("target: length", "taget: length")
    problems = problems_of(recipe_file(tmp_path, text), ["run.seed=-1", "x", "rollout.max_num_seq=3"])
    assert len(problems) == 6
    for expected in ("r.yaml:5: run.num_steps", "functions.1.target: is required", "functions.1.taget: unknown key"):
        assert any(expected in problem for problem in problems), problems
    for expected in ("run.seed=-1: run.seed", "x: an override is", "did you mean rollout.max_num_seqs?"):
        assert any(expected in problem for problem in problems), problems


def test_rooms_that_do_not_fit_together_are_told_line_by_line(tmp_path: Path) -> None:
    problems = problems_of(recipe_file(tmp_path), ["run.group_size=65", "trainer.algorithm.minibatches=7"])
    assert len(problems) == 2


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_an_estimator_that_compares_in_a_group_refuses_a_group_of_one(tmp_path: Path, estimator: str) -> None:
    needs = {
        "gdpo": "trainer.algorithm.gdpo_weights={length: 1}",
        "distillation": "reference.model=some/teacher",
        "gae": "trainer.critic={}",
    }
    overrides = [f"trainer.algorithm.adv_estimator={estimator}", *([needs[estimator]] if estimator in needs else [])]
    assert load_config(recipe_file(tmp_path), overrides).rules().min_group_samples == (1 if alone(estimator) else 2)
    if alone(estimator):
        load_config(recipe_file(tmp_path), [*overrides, "run.group_size=1"])
    else:
        (problem,) = problems_of(recipe_file(tmp_path), [*overrides, "run.group_size=1"])
        assert f"leaves nothing to compare with: {estimator} needs at least 2" in problem


def alone(estimator: str) -> bool:
    """Without a group."""
    return estimator in ("gae", "reinforce", "reinforce_plus_plus", "remax", "distillation")


def test_missing_files_are_told_together(tmp_path: Path) -> None:
    overrides = ["tiny=null", "model=/nowhere", "data.type=file", "data.path=[/nowhere/a.jsonl, /nowhere/b.jsonl]"]
    assert len(problems_of(recipe_file(tmp_path), overrides)) == 3


def test_an_unknown_recipe_is_told_with_the_nearest_one() -> None:
    (problem,) = problems_of("dmo")
    assert problem.startswith("dmo: no such recipe or file; did you mean demo?")


def test_a_file_that_is_not_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert problems_of(str(path))[0].startswith(f"{path}: cannot be read: ")


def test_every_recipe_of_the_house_is_fine_but_for_its_files() -> None:
    for path in sorted(RECIPES.glob("*.yaml")):
        try:
            (load_sft_config if is_supervised(path.stem) else load_config)(path.stem)
        except ConfigError as error:
            assert all("no such file" in problem or "no model folder" in problem for problem in error.problems), path


def test_a_config_survives_the_wire_and_the_run_folder(tmp_path: Path) -> None:
    config = load_config(recipe_file(tmp_path), ["rollout.sampling.stop=[a]"])
    assert load_json(config.model_dump_json()) == config
    assert Config.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_the_servers_of_a_fleet_count_for_a_synchronous_step(tmp_path: Path) -> None:
    whole_step = ["run.max_staleness=0", "run.prompts_per_step=17", "launch.rollout_servers=1"]
    config = load_config(recipe_file(tmp_path), [*whole_step, "launch.fleet=[{rollout: {max_num_seqs: 2}}]"])
    assert [config.rollout_of(member).max_num_seqs for member in config.fleet] == [32, 2]


def test_a_service_changes_its_own_section_and_no_other(tmp_path: Path) -> None:
    config = load_config(recipe_file(tmp_path))
    changed = override_section(config, "rollout", ["rollout.max_num_seqs=1", "rollout.sampling.top_k=3"])
    assert (changed.rollout.max_num_seqs, changed.rollout.sampling.top_k) == (1, 3)
    assert changed.model_copy(update={"rollout": config.rollout}) == config
    for overrides, problem in [
        (["run.num_steps=3"], "run.num_steps=3: a rollout service takes settings of rollout only; the others are"),
        (["rollout.max_num_seqs=0"], "rollout.max_num_seqs=0: rollout.max_num_seqs: Input should be greater than or"),
        (["rollout.max_num_seq=4"], "unknown key; did you mean rollout.max_num_seqs?"),
        (["rollout"], "rollout: an override is written key.path=value"),
    ]:
        with pytest.raises(ConfigError) as told:
            override_section(config, "rollout", overrides)
        assert len(told.value.problems) == 1 and problem in told.value.problems[0], told.value.problems


def test_a_hub_id_needs_no_folder(tmp_path: Path) -> None:
    config = load_config(recipe_file(tmp_path), ["tiny=null", "model=owner/model"])
    assert (config.rollout.model, config.trainer.model) == ("owner/model", "owner/model")


def test_checking_a_config_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "grpc", "numpy", "pyarrow", "google.protobuf", "vllm")
    code = (
        "import sys\nfrom services.compose import load_config\nimport services.config\nload_config('demo')\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
