"""Files of several ranks: put together, in one file or several, restored on one rank, and what is missing is told."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.commands.export import export_model, loadable
from trainer import durable
from trainer.checkpoints.blocks import PLACES, rank_file, stored
from trainer.checkpoints.due import Due
from trainer.checkpoints.failure import CheckpointFailed
from trainer.checkpoints.restore import restore
from trainer.checkpoints.snapshot import snapshot
from trainer.checkpoints.store import CheckpointStore
from trainer.checkpoints.trained import parts_of
from trainer.checkpoints.whole import whole_tensors, write_whole
from trainer.config import CheckpointConfig, TrainerConfig
from trainer.model.load import load_model
from trainer.step import Learner

torch.set_num_threads(1)


def write_shards(folder: Path, part: str, tensors: dict[str, Tensor], *, size: int) -> None:
    """As FSDP2 shards them: rows, in blocks of equal size as far as they go; scalars on rank 0."""
    for rank in range(size):
        blocks, places = {}, {}
        for name, tensor in tensors.items():
            rows = -(-len(tensor) // size) if tensor.ndim else 0
            block = tensor[rank * rows : (rank + 1) * rows].contiguous() if tensor.ndim else tensor
            if block.numel() and (tensor.ndim or rank == 0):
                blocks[name] = block
                offsets = [rank * rows, *[0] * (tensor.ndim - 1)][: tensor.ndim]
                places[name] = [tensor.shape, offsets]
        save_file(blocks, folder / rank_file(part, rank=rank, size=size), metadata={PLACES: json.dumps(places)})


TENSORS = {
    "byte": torch.arange(5, dtype=torch.uint8),
    "wide": torch.arange(21, dtype=torch.float64).view(7, 3),
    "half": torch.randn(3, 2, 2).to(torch.bfloat16),
    "step": torch.tensor(4.0),
}


def test_blocks_are_put_together(tmp_path: Path) -> None:
    write_shards(tmp_path, "critic/model", TENSORS, size=4)
    found = whole_tensors(tmp_path, "critic/model")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) and found[name].dtype == TENSORS[name].dtype for name in found)
    assert (tmp_path / "rank-3-of-4.critic-model.safetensors").is_file()
    assert {block.file.name[:11] for block in stored(tmp_path, "critic/model")["half"].blocks} == {
        "rank-0-of-4",
        "rank-1-of-4",
        "rank-2-of-4",
    }


def test_a_block_that_is_missing_is_told(tmp_path: Path) -> None:
    write_shards(tmp_path, "model", TENSORS, size=2)
    (tmp_path / "rank-1-of-2.model.safetensors").unlink()
    with pytest.raises(CheckpointFailed, match=r"the blocks of \w+ do not make up \("):
        whole_tensors(tmp_path, "model")
    with pytest.raises(CheckpointFailed, match=r"has no optimizer\.safetensors, nor one of any rank"):
        whole_tensors(tmp_path, "optimizer")


@pytest.mark.parametrize("file_bytes", [1, 30, 200, 10**9])
def test_a_model_goes_into_as_many_files_as_it_needs(tmp_path: Path, file_bytes: int) -> None:
    write_shards(tmp_path, "model", TENSORS, size=3)
    out = tmp_path / "out"
    out.mkdir()
    write_whole(tmp_path, "model", out, file_bytes=file_bytes)
    files = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    assert sum(map(len, files.values())) == len(TENSORS)
    assert all(torch.equal(tensor, TENSORS[name]) for one in files.values() for name, tensor in one.items())
    if len(files) == 1:
        assert {path.name for path in out.iterdir()} == {"model.safetensors"}
        return
    assert len(files) == {1: 4, 30: 3, 200: 2}[file_bytes]  # 5, 24, 4 and 168 bytes, by name
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 + 168 + 24 + 4
    assert index["weight_map"] == {name: file for file, one in files.items() for name in one}


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    folder = tmp_path / "start"
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(folder)
    config = TrainerConfig(model=str(folder), device="cpu")
    made = Learner(load_model(str(folder), dtype="float32", attn_implementation="sdpa", device="cpu"), config)
    for parameter in made.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    made.optimizer.step()
    made.optimizer.zero_grad()
    return made


def sharded(folder: Path, learner: Learner) -> Path:
    """A checkpoint of one rank, laid out again as one of three, and sealed."""
    path = CheckpointStore(folder, CheckpointConfig(), incarnation=1).write(snapshot(learner, step=1, policy_version=1))
    for part in ("model", "optimizer"):
        write_shards(path, part, load_file(path / f"{part}.safetensors"), size=3)
        (path / f"{part}.safetensors").unlink()
    (path / "manifest.json").unlink()
    durable.seal(path, {"format": 1, "step": 1})
    return path


def moments_of(learner: Learner) -> dict[str, Tensor]:
    return parts_of(learner)["optimizer"]


def test_one_rank_restores_and_exports_what_three_have_written(tmp_path: Path, learner: Learner) -> None:
    path = sharded(tmp_path / "checkpoints", learner)
    model = learner.model.state_dict()
    expected = {name: tensor.clone() for name, tensor in model.items()}
    moments = {name: value.clone() for name, value in moments_of(learner).items()}
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.zero_()
    learner.optimizer.state.clear()
    assert restore(path, learner).step == 1
    assert all(torch.equal(model[name], expected[name]) for name in expected)
    found = moments_of(learner)
    assert found.keys() == moments.keys() and all(torch.equal(found[name], moments[name]) for name in moments)
    assert export_model(tmp_path, tmp_path / "out") == 0
    with loadable(path) as folder, loadable(tmp_path / "out") as same:
        assert same == tmp_path / "out" and folder not in (path, same)
        for one in (folder, same):
            exported = AutoModelForCausalLM.from_pretrained(one).state_dict()
            assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert not folder.exists()


def test_a_model_in_several_files_loads_as_one(tmp_path: Path, learner: Learner) -> None:
    path = sharded(tmp_path / "checkpoints", learner)
    out = tmp_path / "out"
    out.mkdir()
    write_whole(path, "model", out, file_bytes=1000)
    (out / "config.json").write_bytes((path / "config.json").read_bytes())
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    exported = AutoModelForCausalLM.from_pretrained(out).state_dict()
    expected = learner.model.state_dict()
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


def test_moments_of_another_model_are_refused_before_anything_changes(tmp_path: Path, learner: Learner) -> None:
    path = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(), incarnation=1).write(
        snapshot(learner, step=1, policy_version=1)
    )
    moments = load_file(path / "optimizer.safetensors")
    name = next(name for name in moments if name.endswith("exp_avg"))
    save_file({**moments, name: torch.zeros(3)}, path / "optimizer.safetensors")
    weight = next(learner.model.parameters())
    with torch.no_grad():
        weight.fill_(7)
    with pytest.raises(CheckpointFailed, match=r"of another model: its .* is \(3,\)"):
        restore(path, learner)
    assert bool((weight == 7).all())


def test_a_seal_believes_what_other_processes_have_measured_and_looks_for_their_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    found = {"a": durable.measured(tmp_path / "a")}
    with pytest.raises(OSError, match="is not as it was written"):
        durable.seal(tmp_path, {}, measured_before={"a": {**found["a"], "size": 2}})
    with pytest.raises(FileNotFoundError):
        durable.seal(tmp_path, {}, measured_before={"elsewhere": found["a"]})
    durable.seal(tmp_path, {}, measured_before=found)
    assert durable.problems(tmp_path) == []
    (tmp_path / "b").write_text("c")
    assert [len(durable.problems(tmp_path, rank=rank, size=2)) for rank in range(2)] == [0, 1]


def test_a_checkpoint_is_due_by_steps_or_by_time() -> None:
    now = [100.0]
    due = Due(CheckpointConfig(every_steps=3, every_minutes=2), lambda: now[0])
    assert [step for step in range(1, 8) if due.after(step)] == [3, 6]
    now[0] += 119
    assert not due.after(4)
    now[0] += 1
    assert due.after(4)
    due.saved()
    assert not due.after(5) and due.after(6)
    never = Due(CheckpointConfig(every_steps=0), lambda: now[0])
    now[0] += 1e9
    assert not never.after(50)
