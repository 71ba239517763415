"""LoRA: what is frozen, what a sum comes to by hand, and that a model is its base where the adapter is off."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from protos.tensors import named_views
from tests.unit.trainer.scenes import SHAPE
from trainer.adapters.lora import (
    adapter_off,
    adapter_weights,
    attach_adapter,
    base_fingerprint,
    low_rank_weights,
    target_names,
)
from trainer.adapters.push import outgoing_of
from trainer.configs.lora import LoraConfig
from trainer.configs.update import OptimizerConfig
from trainer.optimizer import build_optimizer
from trainer.small.tiny import make_tiny_qwen3

torch.set_num_threads(1)
TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), seed=1, shape=SHAPE)


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapted(folder: Path, *, moved: bool = True, **settings: Any) -> Any:
    """With an adapter; `moved`: as after some training."""
    model = attach_adapter(plain(folder), LoraConfig(**{"rank": 4, **settings}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for one in adapter_weights(model).values() if moved else ():
            one.add_((torch.randn(one.shape, generator=generator) * 0.2).to(one.dtype))
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=TOKENS).logits
    return found


def test_only_the_adapter_takes_a_gradient_and_only_it_is_optimized(folder: Path) -> None:
    model = adapted(folder, moved=False, target_modules=("q_proj", "v_proj"))
    model(input_ids=TOKENS).logits.square().mean().backward()
    with_gradient = {name for name, one in model.named_parameters() if one.grad is not None}
    assert with_gradient == {
        f"model.layers.{layer}.self_attn.{target}.lora_{which}.default.weight"
        for layer in (0, 1)
        for target in ("q_proj", "v_proj")
        for which in "AB"
    }
    optimizer = build_optimizer(model, OptimizerConfig())
    assert sum(one.numel() for group in optimizer.param_groups for one in group["params"]) == sum(
        one.numel() for one in adapter_weights(model).values()
    )


def test_version_0_is_the_base_model_and_another_seed_another_start(folder: Path) -> None:
    state = torch.get_rng_state()
    model = adapted(folder, moved=False)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    assert torch.equal(logits(model), logits(plain(folder)))
    same, other = adapted(folder, moved=False), adapted(folder, moved=False, seed=1)
    first, again, different = (adapter_weights(one) for one in (model, same, other))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], different[name]) for name in first)


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 8 / 4), (True, 8 / math.sqrt(4))])
def test_a_sum_is_what_it_is_by_hand(rslora: bool, scaling: float) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(2, 3, bias=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.up(x)
            return out

    net = attach_adapter(Net(), LoraConfig(rank=4, alpha=8, rslora=rslora))
    (one,) = low_rank_weights(net).values()
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    b = torch.tensor([[1.0, 0.0, 0.0, 5.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    with torch.no_grad():
        one.base.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
        one.a.copy_(a)
        one.b.copy_(b)
    place = torch.empty(3, 2)
    one.into(place)
    expected = torch.tensor([[1 + scaling, 2.0], [3.0, 4 + scaling], [5 + scaling, 6 + scaling]])
    assert one.scaling == scaling and torch.equal(place, expected)
    bias = dict(net.named_parameters())["up.base_layer.bias"]
    torch.testing.assert_close(net(torch.eye(2)), (expected @ torch.eye(2)).T + bias)


def test_a_sum_is_the_same_in_one_block_and_in_many(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    one = low_rank_weights(adapted(folder))["model.layers.0.mlp.up_proj.weight"]
    places = [torch.empty(one.shape), torch.empty(one.shape)]
    one.into(places[0])
    monkeypatch.setattr("protos.lowrank.BLOCK_ELEMENTS", 16 * 5)
    one.into(places[1])
    torch.testing.assert_close(places[0], places[1], rtol=0, atol=1e-6)


def test_merged_weights_are_those_of_the_plain_model_and_compute_the_same(folder: Path) -> None:
    model = adapted(folder)
    outgoing = outgoing_of(model, LoraConfig(rank=4), bucket_bytes=2000, dtype=None, streamed=False)
    outgoing.pack()
    other = plain(folder)
    assert [slot.name for bucket in outgoing.plan for slot in bucket.slots] == [
        name for name, _ in other.named_parameters()
    ]
    assert (logits(other) - logits(model)).abs().max() > 0.1
    other.load_state_dict(dict(named_views(outgoing.plan, outgoing.buffers)), strict=False)
    torch.testing.assert_close(logits(other), logits(model), rtol=0, atol=1e-5)


def test_an_adapter_push_is_a_small_part_of_a_merged_one(folder: Path) -> None:
    config = LoraConfig(rank=1, push="adapter", target_modules=("q_proj",))
    model = adapted(folder, rank=1, target_modules=("q_proj",))
    outgoing = outgoing_of(model, config, bucket_bytes=2000, dtype=torch.bfloat16, streamed=False)
    assert outgoing.num_bytes == 2 * (16 + 16) * 4, "two layers, A and B in their own dtype"
    assert [one.name for one in outgoing.manifest.low_rank] == [
        f"model.layers.{at}.self_attn.q_proj.weight" for at in (0, 1)
    ]


def test_where_the_adapter_is_off_the_model_is_its_base_also_after_an_error(folder: Path) -> None:
    model, base = adapted(folder), plain(folder)
    trained = logits(model)
    assert not torch.equal(trained, logits(base))
    with pytest.raises(RuntimeError, match="stop"), adapter_off(model):
        assert torch.equal(logits(model), logits(base))
        raise RuntimeError("stop")
    assert torch.equal(logits(model), trained)
    assert all(one.requires_grad for one in adapter_weights(model).values())


def test_the_fingerprint_is_that_of_the_base_alone(folder: Path) -> None:
    model, other = adapted(folder), adapted(folder, moved=False, rank=2, target_modules=("v_proj",))
    assert base_fingerprint(model) == base_fingerprint(other) == base_fingerprint(plain(folder))
    with torch.no_grad():
        other.model.norm.weight[0] += 1e-3
    assert base_fingerprint(model) != base_fingerprint(other)


def test_the_adapter_is_float32_beside_bfloat16_weights(folder: Path) -> None:
    model = attach_adapter(plain(folder).to(torch.bfloat16), LoraConfig(rank=2))
    assert {one.dtype for one in adapter_weights(model).values()} == {torch.float32}
    assert logits(model).dtype == torch.bfloat16
    half = attach_adapter(plain(folder).to(torch.bfloat16), LoraConfig(rank=2, dtype="bfloat16"))
    assert {one.dtype for one in adapter_weights(half).values()} == {torch.bfloat16}


def test_all_linear_is_every_layer_but_the_head(folder: Path) -> None:
    names = {name.rpartition(".")[2] for name in target_names(plain(folder), LoraConfig())}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("target", ["lm_head", "q_porj", "nothing"])
def test_an_unknown_target_is_told_with_the_nearest_name(folder: Path, target: str) -> None:
    hint = "did you mean 'q_proj'.*existing: down_proj, gate_proj" if target == "q_porj" else f"is named '{target}'"
    with pytest.raises(ValueError, match=hint):
        target_names(plain(folder), LoraConfig(target_modules=("v_proj", target)))


@pytest.mark.parametrize("wrong", [{"dropout": 0.1}, {"target_modules": ()}, {"rank": 0}, {"push": "both"}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        LoraConfig(**wrong)
