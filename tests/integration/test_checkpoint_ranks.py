"""Checkpoints of several ranks: written beside training, resumed on other numbers of ranks, failing without a hang."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.commands.export import export_model
from trainer.checkpoints.search import newest_whole
from trainer.checkpoints.whole import whole_tensors

pytestmark = pytest.mark.slow
RANK_CODE = Path(__file__).with_name("checkpoint_rank.py")


def run_ranks(size: int, **spec: Any) -> None:
    Path(spec["folder"]).mkdir(parents=True)
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += [str(RANK_CODE), json.dumps(spec, default=str)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANK_CODE.parents[2])}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five rows of a weight lie on four ranks as 2, 2, 1 and none."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 5, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, initializer_range=0.4)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("four") / "out"
    run_ranks(4, folder=folder, model=model)
    return folder


def held(folder: Path, name: str = "held") -> dict[str, Tensor]:
    return load_file(folder / f"{name}.safetensors")


def test_a_checkpoint_of_four_is_resumed_on_two_on_one_and_on_two_replicas(
    tmp_path: Path, model: Path, of_four: Path
) -> None:
    before, replicas_before = of_four, 1
    for size, replicas in ((2, 1), (1, 1), (4, 2)):
        folder = tmp_path / f"{size}-{replicas}"
        spec = {"replicas": replicas, "resume": before / "checkpoints", "changed": replicas != replicas_before}
        run_ranks(size, folder=folder, model=model, **spec)
        expected, found = held(of_four), held(folder)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        written = {
            f"{part}:{name}": tensor
            for part in ("model", "optimizer", "critic/model", "critic/optimizer")
            for name, tensor in whole_tensors(folder / "checkpoints" / "step_2", part).items()
        }
        assert {*expected} - {*written} == {"kl_coef"}
        assert all(torch.equal(expected[name], written[name]) for name in written)
        told = [json.loads((one / "metrics.json").read_text()) for one in (of_four, folder)]
        assert told[1] == pytest.approx(told[0], rel=1e-6, abs=1e-6)
        after = held(folder, "next")
        for name, tensor in held(of_four, "next").items():
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)
        before, replicas_before = folder, replicas


def test_a_checkpoint_of_four_is_exported_as_one_model(tmp_path: Path, of_four: Path) -> None:
    checkpoint = of_four / "checkpoints" / "step_2"
    assert {file.suffix for file in checkpoint.iterdir()} == {".safetensors", ".json"}
    assert len(list(checkpoint.glob("rank-*-of-4.*.safetensors"))) == 16
    assert export_model(of_four, tmp_path / "out") == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in exported.named_parameters():
        assert torch.equal(tensor, held(of_four)[f"model:{name}"])
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json"}


def test_an_adapter_of_two_ranks_is_exported_alone_or_merged(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(2, folder=folder, model=model, lora=True)
    assert export_model(folder, tmp_path / "adapter", adapter=True) == 0
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = {name.partition(":")[2]: one for name, one in held(folder).items() if name.startswith("adapter_model:")}
    assert factors.keys() == expected.keys() and all(torch.equal(factors[name], expected[name]) for name in factors)
    assert export_model(folder, tmp_path / "merged") == 0
    merged, base = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "merged", model))
    prefix = "base_model.model.model.layers.0.mlp.down_proj"
    a, b = factors[f"{prefix}.lora_A.weight"], factors[f"{prefix}.lora_B.weight"]
    found = merged.get_parameter("model.layers.0.mlp.down_proj.weight")
    scaled = base.get_parameter("model.layers.0.mlp.down_proj.weight") + scaling(tmp_path / "adapter") * b @ a
    assert b.abs().max() > 0
    torch.testing.assert_close(found, scaled, rtol=0, atol=1e-6)


def scaling(adapter: Path) -> float:
    settings = json.loads((adapter / "adapter_config.json").read_text())
    rank = settings["r"]
    return float(settings["lora_alpha"] / (rank**0.5 if settings["use_rslora"] else rank))


@pytest.mark.parametrize("name", ["rank-3-of-4.model.safetensors", "rank-0-of-4.optimizer.safetensors"])
@pytest.mark.parametrize("torn", ["flipped", "cut", "gone"])
def test_a_torn_file_of_one_rank_is_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, of_four: Path, name: str, torn: str
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(of_four / "checkpoints", folder)
    shutil.copytree(folder / "step_2", folder / "step_1")
    assert newest_whole(folder) == (folder / "step_2", [])
    path = folder / "step_2" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content if torn == "flipped" else content[:-8])
    if torn == "gone":
        path.unlink()
    found, problems = newest_whole(folder)
    assert found == folder / "step_1"
    assert len(problems) == 1 and str(path) in problems[0]


def test_a_rank_that_cannot_write_or_is_late_fails_the_save_and_later_ones_work(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "out"
    run_ranks(2, folder=folder, model=model, fail=True)
    told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]
    for of_rank in told:
        assert of_rank[0] == "step_1"
        assert "step_2 was not written: rank 1: " in of_rank[1]
        assert of_rank[2:4] == ["disk is there again", "step_3"]
        assert of_rank[-5:] == ["rank 1 is back", "step_6", "step_7", "step_8", "step_9"]
        assert "ranks [1] still write the checkpoint before" in of_rank
    assert "step_4 was not written" in told[0][4]
    assert "CheckpointFailed" in told[1]
    kept = sorted(entry.name for entry in (folder / "checkpoints").iterdir())
    assert kept == ["latest", "step_8", "step_9"], "nothing half-written is left"
    assert newest_whole(folder / "checkpoints") == (folder / "checkpoints" / "step_9", [])
