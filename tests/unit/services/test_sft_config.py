"""The config of supervised training: what is shared, and what is told before anything starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.tokens import PromptEncoder
from services.commands.candidate import compose
from services.compose import load_config
from services.errors import ConfigError
from services.supervised.command import check_gpus
from services.supervised.compose import is_supervised, load_sft_config
from services.supervised.rows import sft_rows
from services.supervised.run import keep_until
from trainer.small.tiny import make_tiny_qwen3

RECIPE: dict[str, Any] = {
    "tiny": {"preset": "demo"},
    "run": {"name": "it"},
    "data": {"type": "arithmetic", "digits": 1},
    "sft": {"num_steps": 5, "batch_size": 8},
}


def recipe_file(folder: Path, **sections: Any) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE | sections))
    return str(path)


def problems_of(recipe: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as told:
        load_sft_config(recipe, overrides)
    return told.value.problems


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny", preset="demo")


def test_model_and_number_of_steps_are_said_once(tmp_path: Path) -> None:
    config = load_sft_config(recipe_file(tmp_path), ["trainer.optimizer.schedule=cosine"])
    assert config.trainer.model == config.model == "outputs/it/model"
    assert config.trainer.optimizer.total_steps == 5


def test_epochs_round_up_to_whole_batches(tmp_path: Path) -> None:
    config = load_sft_config(recipe_file(tmp_path, sft={"epochs": 2, "batch_size": 8}))
    assert config.sft.steps(num_rows=10) == 3


def test_mistakes_are_told_with_their_lines_and_the_nearest_key(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, rollout={})
    problems = problems_of(path, "sft.batchsize=3", "sft.epochs=1", "trainer.optimzer.lr=1")
    lines = Path(path).read_text().splitlines()
    assert f"{path}:{lines.index('rollout: {}') + 1}: rollout: unknown key" in "".join(problems)
    assert "sft.batchsize=3: sft.batchsize: unknown key; did you mean sft.batch_size?" in problems
    assert "trainer.optimzer.lr=1: trainer.optimzer: unknown key; did you mean trainer.optimizer?" in problems


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.type=random", "supervised training needs responses"),
        ("tiny.warm_start_steps=9", "tiny.warm_start_steps is a supervised start of its own"),
        ("trainer.algorithm.loss=gspo", "trainer.algorithm is that of reinforcement learning"),
        (
            "trainer.guards.kl_above=1",
            "trainer.guards.kl_above looks at a figure that supervised training does not have",
        ),
        ("sft.held_out_share=1", "sft.held_out_share: Input should be less than 1"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, override: str, told: str) -> None:
    (problem,) = problems_of(recipe_file(tmp_path), override)
    assert problem.startswith(f"{override}: ") and told in problem


def test_a_run_is_as_long_as_one_setting_says(tmp_path: Path) -> None:
    path = recipe_file(tmp_path)
    assert problems_of(path, "sft.epochs=1") == [f"{path}:6: sft: say either num_steps or epochs"]


def test_held_out_rows_have_to_come_from_somewhere(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "response": "2"}\n')
    path = recipe_file(tmp_path, data={"type": "file", "path": str(rows)})
    (problem,) = problems_of(path, "sft.evaluate_every=2")
    assert "data.type=file has no other split to hold out" in problem
    load_sft_config(path, ["sft.evaluate_every=2", "sft.held_out_share=0.5"])


def test_missing_files_are_told(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, tiny=None, model="./nowhere", data={"type": "gsm8k", "path": "nodata"})
    assert [problem.split(": ", 1)[1] for problem in problems_of(path)] == [
        "model: no model folder at ./nowhere",
        "data.path: no such file: nodata",
    ]


def test_ranks_do_not_share_a_gpu(tmp_path: Path) -> None:
    config = load_sft_config(recipe_file(tmp_path), ["launch.trainer_ranks=3"])
    with pytest.raises(ConfigError, match="each takes a GPU of its own, and 2 are visible"):
        check_gpus(config, ("0", "1"))
    for visible in ((), ("0", "1", "2")):
        check_gpus(config, visible)
    check_gpus(load_sft_config(recipe_file(tmp_path), ["launch.trainer_ranks=3", "trainer.device=cpu"]), ("0",))


def test_a_recipe_of_one_kind_names_the_command_for_it(tmp_path: Path) -> None:
    path = recipe_file(tmp_path)
    assert is_supervised(path) and not is_supervised("demo")
    with pytest.raises(ConfigError, match=f"sft: supervised training is started by offbeat sft {path}"):
        load_config(path)


def test_what_a_supervised_run_is_evaluated_on_has_to_be_said(tmp_path: Path, model: Path) -> None:
    path, rows = recipe_file(tmp_path), tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    asked = partial(compose, str(model), recipe=path, engine=None, overrides=())
    with pytest.raises(ConfigError, match="supervised training has no reward: say --recipe, or --data and --reward"):
        asked(data=None, reward=None)
    assert asked(data=rows, reward="arithmetic").data.paths == (str(rows),)


def test_a_pointer_stands_for_its_checkpoint_where_that_is_a_model(tmp_path: Path) -> None:
    checkpoints, path = tmp_path / "checkpoints", recipe_file(tmp_path, tiny=None)
    (checkpoints / "step_4").mkdir(parents=True)
    (checkpoints / "latest").write_text("step_4")
    (checkpoints / "step_4" / "config.json").write_text("{}")
    words = [f"model={checkpoints / 'latest'}"]
    assert "is no model by itself (several ranks or LoRA wrote it): offbeat export it" in problems_of(path, *words)[0]

    (checkpoints / "step_4" / "model.safetensors").write_text("")
    assert load_sft_config(path, words).trainer.model == str(checkpoints / "step_4")
    run = load_config("demo", [*words, "tiny=null"])
    assert run.trainer.model == run.rollout.model == str(checkpoints / "step_4")


# Rows.


def test_rows_come_as_the_rollouts_encode_them_and_their_order_follows_from_the_position(
    tmp_path: Path, model: Path
) -> None:
    path = recipe_file(tmp_path, tiny=None, model=str(model))
    rows, again = sft_rows(load_sft_config(path)), sft_rows(load_sft_config(path))
    other = sft_rows(load_sft_config(path, ["data.seed=1"]))
    assert [one.key for one in rows.at(40, 90)] == [one.key for one in again.at(40, 90)]
    assert rows.fingerprint == again.fingerprint != other.fingerprint
    example, encode = rows.at(0, 1)[0], PromptEncoder(str(model))
    text = example.key.removeprefix("arithmetic/train/")
    assert example.prompt_ids.tolist() == encode(text).tolist()
    assert example.response_ids.tolist() == encode.response(str(sum(map(int, text[:-1].split("+"))))).tolist()


def test_long_rows_are_counted_and_left_out(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = recipe_file(tmp_path, tiny=None, model=str(model))
    full = sft_rows(load_sft_config(path))
    lengths = [example.length for example in full.examples.values()]
    assert set(lengths) == {6, 7}, "1+1=2 and an end, 9+9=18 and an end"
    short = sft_rows(load_sft_config(path, ["sft.max_length=6"]))
    assert len(short.stream) == lengths.count(6)
    (record,) = caplog.records
    assert record.facts["rows"] == lengths.count(7)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"rows is longer than sft\.max_length=5 tokens"):
        sft_rows(load_sft_config(path, ["sft.max_length=5"]))


def test_held_out_rows_are_not_learned(tmp_path: Path, model: Path) -> None:
    path = recipe_file(tmp_path, tiny=None, model=str(model))
    for words in (["sft.held_out_share=0.25"], []):
        rows = sft_rows(load_sft_config(path, ["sft.evaluate_every=1", *words]))
        held_out = {example.key for example in rows.held_out}
        assert held_out and not held_out & rows.examples.keys()
    assert all(key.startswith("arithmetic/test/") for key in held_out), "the other split, where no share is asked for"


def test_figures_of_steps_that_will_be_made_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1.0}\n{"step":2.0}\n{"step":3.0}\n{"ste')
    keep_until(path, 2)
    assert path.read_text() == '{"step":1.0}\n{"step":2.0}\n'
