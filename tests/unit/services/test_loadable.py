"""What an engine is given of a checkpoint: the model and nothing that it could take for weights."""

from __future__ import annotations

from pathlib import Path

from services.commands.export import loadable

TRAINING = ("manifest.json", "optimizer.safetensors", "state.json")
CHECKPOINT = ("config.json", "model.safetensors", "tokenizer.json", *TRAINING)


def made(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f"this is {name}")
    return folder


def test_the_optimizer_beside_a_model_is_left_out(tmp_path: Path) -> None:
    checkpoint = made(tmp_path / "step_1", *CHECKPOINT)
    with loadable(checkpoint) as folder:
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert (folder / "model.safetensors").read_text() == "this is model.safetensors"
    assert not folder.exists() and sorted(file.name for file in checkpoint.iterdir()) == sorted(CHECKPOINT)


def test_a_folder_with_a_model_alone_is_loaded_as_it_is(tmp_path: Path) -> None:
    checkpoint = made(tmp_path / "step_1", "config.json", "model.safetensors")
    with loadable(checkpoint) as folder:
        assert folder == checkpoint
    assert checkpoint.is_dir()
