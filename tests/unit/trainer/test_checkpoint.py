"""Checkpoints: the same bits again, and every way in which one can be torn."""

import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.unit.trainer.scenes import train
from trainer.checkpoints.failure import CheckpointFailed
from trainer.checkpoints.restore import Restored, restore
from trainer.checkpoints.snapshot import snapshot
from trainer.checkpoints.store import CheckpointStore
from trainer.config import AlgorithmConfig, CheckpointConfig, TrainerConfig
from trainer.configs.update import OptimizerConfig
from trainer.model.load import load_model, model_fingerprint, model_folder
from trainer.step import Learner

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def make_learner(start: Path) -> Learner:
    config = TrainerConfig(
        model=str(start), device="cpu", optimizer=OptimizerConfig(lr=1e-2, schedule="linear", total_steps=9)
    )
    return Learner(load_model(str(start), dtype="float32", attn_implementation="sdpa", device="cpu"), config)


def store(folder: Path, *, keep_last: int = 3, keep_every: int = 0, incarnation: int = 1) -> CheckpointStore:
    return CheckpointStore(
        folder, CheckpointConfig(keep_last=keep_last, keep_every=keep_every), incarnation=incarnation
    )


def saved(folder: Path, start: Path, *steps: int) -> CheckpointStore:
    kept, learner = store(folder), make_learner(start)
    for step in steps:
        train(learner, step)
        kept.write(snapshot(learner, step=step, policy_version=step))
    return kept


def everything(learner: Learner) -> list[torch.Tensor]:
    moments = [state[key] for state in learner.optimizer.state.values() for key in sorted(state)]
    return [*learner.model.state_dict().values(), *moments]


def test_training_goes_on_bit_for_bit_after_a_restore(tmp_path: Path, start: Path) -> None:
    learner = make_learner(start)
    for step in (0, 1):
        train(learner, step)
    path = store(tmp_path).write(snapshot(learner, step=2, policy_version=5, extra={"cursor": [1, "a"]}))
    drawn = [torch.rand(1).item(), np.random.rand(), np.random.randn(), random.random()]
    told = [train(learner, step) for step in (2, 3)]

    again = make_learner(start)
    torch.manual_seed(123)
    found = restore(path, again)
    assert found == Restored(step=2, policy_version=5, extra={"cursor": [1, "a"]}, config_changed=False)
    assert [torch.rand(1).item(), np.random.rand(), np.random.randn(), random.random()] == drawn
    assert [train(again, step) for step in (2, 3)] == told
    assert all(torch.equal(a, b) for a, b in zip(everything(learner), everything(again), strict=True))


def test_an_adaptive_kl_coefficient_is_saved_and_a_fixed_one_is_the_configs(tmp_path: Path, start: Path) -> None:
    learner = make_learner(start)
    learner.kl_coef = 0.1 + 1e-17
    path = store(tmp_path).write(snapshot(learner, step=2, policy_version=2))
    for target, expected in ((0.05, learner.kl_coef), (None, 0.3)):
        again = make_learner(start)
        algorithm = AlgorithmConfig(kl_use="reward", kl_coef=0.3, kl_target=target)
        again.config = again.config.model_copy(update={"algorithm": algorithm})
        again.kl_coef = algorithm.kl_coef
        restore(path, again)
        assert again.kl_coef == expected


def test_a_snapshot_does_not_see_later_steps(tmp_path: Path, start: Path) -> None:
    learner = make_learner(start)
    train(learner, 0)
    taken = snapshot(learner, step=1, policy_version=1)
    before = [tensor.clone() for tensor in everything(learner)]
    train(learner, 1)
    restore(store(tmp_path).write(taken), learner)
    assert all(torch.equal(a, b) for a, b in zip(everything(learner), before, strict=True))


def test_a_checkpoint_is_a_hugging_face_model_without_pickle(tmp_path: Path, start: Path) -> None:
    learner = make_learner(start)
    train(learner, 0)
    path = store(tmp_path).write(snapshot(learner, step=1, policy_version=1))
    exported = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(a, exported.state_dict()[name]) for name, a in learner.model.state_dict().items())
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    assert model_fingerprint(path) == model_fingerprint(start)
    assert path.stat().st_mode & 0o777 == 0o700


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def link_away(file: Path) -> None:
    moved = file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(moved)


@pytest.mark.parametrize("tear", [truncate, flip_a_bit, Path.unlink, link_away])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_torn_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, start: Path, name: str, tear: Callable[[Path], object]
) -> None:
    kept = saved(tmp_path, start, 1, 2)
    tear(tmp_path / "step_2" / name)
    path, problems = kept.latest_verified()
    assert path == tmp_path / "step_1"
    assert len(problems) == 1 and str(tmp_path / "step_2" / name) in problems[0]


def test_each_truncation_is_found(tmp_path: Path, start: Path) -> None:
    kept = saved(tmp_path, start, 1)
    content = (tmp_path / "step_1" / "manifest.json").read_bytes()
    for size in random.Random(0).sample(range(len(content)), 20):
        (tmp_path / "step_1" / "manifest.json").write_bytes(content[:size])
        assert kept.latest_verified()[0] is None


def test_the_pointer_decides_and_is_not_needed(tmp_path: Path, start: Path) -> None:
    kept = saved(tmp_path, start, 1, 2)
    (tmp_path / "latest").write_text("step_1")
    assert kept.latest_verified() == (tmp_path / "step_1", [])
    (tmp_path / "latest").unlink()
    path, problems = kept.latest_verified()
    assert path == tmp_path / "step_2" and "latest" in problems[0]
    (tmp_path / "latest").write_text("step_2")
    shutil.rmtree(tmp_path / "step_2")
    path, problems = kept.latest_verified()
    assert path == tmp_path / "step_1" and "step_2 is missing" in problems[0]


def test_an_empty_folder_has_no_checkpoint_and_no_problem(tmp_path: Path) -> None:
    assert store(tmp_path / "fresh").latest_verified() == (None, [])


def test_pruning_keeps_the_last_and_every_nth(tmp_path: Path, start: Path) -> None:
    kept, learner = store(tmp_path, keep_last=2, keep_every=4), make_learner(start)
    for step in range(1, 8):
        kept.write(snapshot(learner, step=step, policy_version=step))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_4", "step_6", "step_7"]


def test_a_step_that_is_there_is_replaced(tmp_path: Path, start: Path) -> None:
    kept = saved(tmp_path, start, 1)
    truncate(tmp_path / "step_1" / "model.safetensors")
    kept.write(snapshot(make_learner(start), step=1, policy_version=1))
    assert kept.latest_verified() == (tmp_path / "step_1", [])


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_replacement_that_fails_half_way_leaves_a_whole_checkpoint(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    kept, calls = saved(tmp_path, start, 1), []

    def failing_once(move: Callable[..., None]) -> Callable[..., None]:
        def moved(*paths: Path) -> None:
            calls.append(paths)
            if len(calls) == failing:
                raise OSError(5, "Input/output error")
            move(*paths)

        return moved

    monkeypatch.setattr(os, "rename", failing_once(os.rename))
    monkeypatch.setattr(os, "replace", failing_once(os.replace))
    with pytest.raises(CheckpointFailed, match="Input/output error"):
        kept.write(snapshot(make_learner(start), step=1, policy_version=1))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_1"]
    assert kept.latest_verified() == (tmp_path / "step_1", [])


def test_leftovers_go_at_start_and_links_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    folder = tmp_path / "checkpoints"
    (folder / "step_3.tmp-1").mkdir(parents=True)
    (folder / "latest.tmp-1").write_text("step_3")
    (folder / "step_4.tmp-1").symlink_to(precious)
    store(folder, incarnation=2)
    assert list(folder.iterdir()) == []
    assert (precious / "file").exists()


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow over 2 KiB: what a full disk looks like to the writer, and to pytest's own log if it lasts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_fails_the_save_and_leaves_nothing(tmp_path: Path, start: Path) -> None:
    kept, learner = saved(tmp_path, start, 1), make_learner(start)
    with small_files(), pytest.raises(CheckpointFailed, match="step_2 was not written"):
        kept.write(snapshot(learner, step=2, policy_version=2))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_1"]
    assert kept.latest_verified() == (tmp_path / "step_1", [])


def test_a_folder_that_vanished_fails_the_save(tmp_path: Path, start: Path) -> None:
    kept = store(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").rmdir()
    with pytest.raises(CheckpointFailed):
        kept.write(snapshot(make_learner(start), step=1, policy_version=1))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFailed, match="cannot use"):
        store(tmp_path / "file")


def test_a_checkpoint_of_another_model_is_refused_untouched(tmp_path: Path, start: Path) -> None:
    path = store(tmp_path).write(snapshot(make_learner(start), step=1, policy_version=1))
    other = make_learner(start)
    other.model.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(CheckpointFailed, match="another model: it differs in extra"):
        restore(path, other)


def test_a_changed_config_is_told(tmp_path: Path, start: Path) -> None:
    path = store(tmp_path).write(snapshot(make_learner(start), step=1, policy_version=1))
    other = make_learner(start)
    other.config = other.config.model_copy(update={"seed": 9})
    assert restore(path, other).config_changed
    assert json.loads((path / "state.json").read_text())["step"] == 1


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no model"):
        model_folder(str(tmp_path))
