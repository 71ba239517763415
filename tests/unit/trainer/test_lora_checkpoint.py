"""Checkpoints of a LoRA run: small, resumed bit for bit on the same base only, exported as a model or as an adapter."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from protos.tensors import named_views
from services.commands.export import export_model
from tests.unit.trainer.scenes import SHAPE, train
from trainer.adapters.lora import attach_adapter
from trainer.adapters.push import outgoing_of
from trainer.checkpoints.failure import CheckpointFailed
from trainer.checkpoints.restore import restore
from trainer.checkpoints.snapshot import snapshot
from trainer.checkpoints.store import CheckpointStore
from trainer.config import CheckpointConfig, TrainerConfig
from trainer.configs.lora import LoraConfig
from trainer.configs.update import OptimizerConfig
from trainer.model.load import load_model, model_fingerprint
from trainer.small.tiny import make_tiny_qwen3
from trainer.step import Learner

torch.set_num_threads(1)
LORA = LoraConfig(rank=3, alpha=6, rslora=True, target_modules=("q_proj", "o_proj", "up_proj"))


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return make_tiny_qwen3(tmp_path / "start", seed=1, shape=SHAPE)


def make_learner(start: Path, lora: LoraConfig | None = LORA) -> Learner:
    config = TrainerConfig(model=str(start), device="cpu", lora=lora, optimizer=OptimizerConfig(lr=1e-2))
    model = load_model(str(start), dtype="float32", attn_implementation="sdpa", device="cpu")
    if lora is not None:
        attach_adapter(model, lora, base_model=str(start))
    return Learner(model, config)


def written(learner: Learner, folder: Path, *, step: int) -> Path:
    store = CheckpointStore(folder, CheckpointConfig(), incarnation=1)
    return store.write(snapshot(learner, step=step, policy_version=step))


def merged_by_push(learner: Learner) -> dict[str, Tensor]:
    """What the rollout servers get."""
    outgoing = outgoing_of(learner.model, LORA, bucket_bytes=10_000, dtype=None, streamed=False)
    outgoing.pack()
    return dict(named_views(outgoing.plan, outgoing.buffers))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits
    return found


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(start: Path, tmp_path: Path) -> None:
    learner = make_learner(start)
    train(learner, 1)
    folder = written(learner, tmp_path / "checkpoints", step=1)
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"} < names
    assert not names & {"model.safetensors", "config.json"}, "nobody takes it for a whole model"
    assert len(load_file(folder / "adapter_model.safetensors")) == 2 * 3 * 2
    state = json.loads((folder / "state.json").read_text())
    assert state["base"]["model"] == str(start) and len(state["base"]["fingerprint"]) == 64


def test_a_resumed_run_goes_on_bit_for_bit(start: Path, tmp_path: Path) -> None:
    whole, first = make_learner(start), make_learner(start)
    for learner, steps in ((whole, (1, 2, 3)), (first, (1, 2))):
        for step in steps:
            train(learner, step)
    second = make_learner(start)
    restored = restore(written(first, tmp_path / "checkpoints", step=2), second)
    assert (restored.step, restored.config_changed) == (2, False)
    train(second, 3)
    expected, found = merged_by_push(whole), merged_by_push(second)
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_export_is_the_pushed_model_and_loads_without_peft(start: Path, tmp_path: Path) -> None:
    learner = make_learner(start)
    for step in (1, 2):
        train(learner, step)
    written(learner, tmp_path / "checkpoints", step=2)
    out = tmp_path / "out"
    assert export_model(tmp_path, out) == 0
    exported: Any = AutoModelForCausalLM.from_pretrained(out)
    found = dict(exported.named_parameters())
    expected = merged_by_push(learner)
    assert found.keys() == expected.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert not torch.equal(logits(exported), logits(AutoModelForCausalLM.from_pretrained(start)))
    assert model_fingerprint(out) == model_fingerprint(start)
    assert AutoTokenizer.from_pretrained(out).vocab_size == AutoTokenizer.from_pretrained(start).vocab_size


def test_an_exported_adapter_is_read_by_peft_and_computes_the_same(start: Path, tmp_path: Path) -> None:
    learner = make_learner(start)
    train(learner, 1)
    written(learner, tmp_path / "checkpoints", step=1)
    out = tmp_path / "out"
    assert export_model(tmp_path, out, adapter=True) == 0
    expected = logits(learner.model)
    for read in (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), str(out)),
        AutoPeftModelForCausalLM.from_pretrained(str(out)),
    ):
        torch.testing.assert_close(logits(read), expected, rtol=0, atol=1e-5)
    assert not torch.equal(expected, logits(AutoModelForCausalLM.from_pretrained(start)))


def test_another_base_is_refused_at_resume_and_at_export(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = make_learner(start)
    train(learner, 1)
    folder = written(learner, tmp_path / "checkpoints", step=1)
    shutil.rmtree(start)
    make_tiny_qwen3(start, seed=2, shape=SHAPE)
    with pytest.raises(CheckpointFailed, match="belongs to"):
        restore(folder, make_learner(start))
    assert export_model(tmp_path, tmp_path / "out") == 2
    assert "has changed since" in capsys.readouterr().err


def test_whole_and_low_rank_checkpoints_are_not_mixed_up(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = written(make_learner(start), tmp_path / "one", step=1)
    whole = written(make_learner(start, None), tmp_path / "two", step=1)
    with pytest.raises(CheckpointFailed, match=r"needs trainer\.lora"):
        restore(adapter, make_learner(start, None))
    with pytest.raises(CheckpointFailed, match=r"whole model, and trainer\.lora is set"):
        restore(whole, make_learner(start))
    with pytest.raises(CheckpointFailed, match=r"\(3, 16\).*\(2, 16\)"):
        restore(adapter, make_learner(start, LORA.model_copy(update={"rank": 2})))
    assert export_model(whole, tmp_path / "out", adapter=True) == 2
    assert "no adapter" in capsys.readouterr().err
