"""`offbeat export`: a checkpoint as a plain Hugging Face folder, or the adapter of a LoRA run as a PEFT folder."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

TRAINING_ONLY = {"state.json", "manifest.json"}


def newest_checkpoint(source: Path) -> Path:
    """The newest whole checkpoint of a run folder, or the checkpoint itself; ValueError where there is none."""
    from trainer.checkpoints.search import newest_whole
    from trainer.durable import problems

    if (source / "manifest.json").is_file():
        found = problems(source)
        if found:
            raise ValueError("; ".join(found))
        return source
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    if not folder.is_dir():
        raise ValueError(f"{source}: no such run or checkpoint folder")
    path, _ = newest_whole(folder)
    if path is None:
        raise ValueError(f"{folder}: no whole checkpoint")
    return path


def export_model(source: Path, out: Path, *, adapter: bool = False) -> int:
    """Write what AutoModelForCausalLM and vLLM need; refuses to write into a folder that holds something.

    adapter: of a LoRA run only the adapter, for PEFT.
    """
    try:
        checkpoint = newest_checkpoint(source)
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"{out}: is not empty")
        export_checkpoint(checkpoint, out, adapter=adapter)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{checkpoint} -> {out}")
    return 0


def export_checkpoint(checkpoint: Path, out: Path, *, adapter: bool) -> None:
    """ValueError where an adapter is wanted and there is none, or the model that it belongs to is gone."""
    has_adapter = (checkpoint / "adapter_config.json").is_file()
    if adapter and not has_adapter:
        raise ValueError(f"{checkpoint}: holds a whole model and no adapter")
    if has_adapter and not adapter:
        write_merged(checkpoint, out)
    else:
        write_plain(checkpoint, out, part="adapter_model" if has_adapter else "model")


@contextmanager
def loadable(checkpoint: Path) -> Iterator[Path]:
    """A folder that AutoModelForCausalLM and vLLM load: the checkpoint itself, where it holds a model and no more.

    Otherwise (beside an optimizer, whose file vLLM would read as weights; an adapter; shards of several ranks) a folder
    of links to it or an export of it, which lives as long as the context.
    """
    tensors = {file.name for file in checkpoint.glob("*.safetensors")}
    if tensors == {"model.safetensors"}:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="offbeat-model-") as scratch:
        if "model.safetensors" in tensors:
            link_all(model_only(checkpoint), Path(scratch))
        else:
            export_checkpoint(checkpoint, Path(scratch), adapter=False)
        yield Path(scratch)


def model_only(checkpoint: Path) -> Iterator[Path]:
    """The files of a whole model."""
    files = (file for file in sorted(checkpoint.iterdir()) if file.is_file() and file.name not in TRAINING_ONLY)
    return (file for file in files if file.suffix != ".safetensors" or file.name == "model.safetensors")


def link_all(files: Iterable[Path], out: Path) -> None:
    for file in files:
        (out / file.name).symlink_to(file.resolve())


def write_plain(checkpoint: Path, out: Path, *, part: str) -> None:
    """The tensors of a part, put together where several ranks have written it, and what is no tensor."""
    from trainer.checkpoints.blocks import whole_file
    from trainer.checkpoints.failure import CheckpointFailed
    from trainer.checkpoints.whole import write_whole

    out.mkdir(parents=True, exist_ok=True)
    if (checkpoint / whole_file(part)).is_file():
        copy_all([checkpoint / whole_file(part)], out)
    else:
        try:
            write_whole(checkpoint, part, out)
        except CheckpointFailed as error:
            raise ValueError(str(error)) from error
    small = (file for file in sorted(checkpoint.iterdir()) if file.suffix != ".safetensors")
    copy_all((file for file in small if file.name not in TRAINING_ONLY), out)


def write_merged(checkpoint: Path, out: Path) -> None:
    """The base model with the adapter in its weights."""
    from trainer.adapters.files import merged_model
    from trainer.model.load import model_files

    model, base = merged_model(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)  # type: ignore[operator]
    copy_all(model_files(base), out)


def copy_all(files: Iterable[Path], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, out / file.name)
