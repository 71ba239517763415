"""An adapter on its way to rollout servers: merged, and as its factors alone. What they serve is the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import protos
from protos.arrays import from_array
from services import faults
from services.rollout import RolloutService
from tests.integration.conftest import SHAPE
from tests.integration.kit import channel_to, lease, talking
from tests.integration.test_push import MakeConfig, addresses, holds, new_pusher, servers
from trainer.adapters.lora import adapter_weights, attach_adapter
from trainer.adapters.push import outgoing_of
from trainer.configs.lora import LoraConfig
from trainer.pushes.outgoing import Outgoing
from trainer.small.tiny import make_tiny_qwen3


def trained(folder: Path, *, seed: int = 5, **settings: Any) -> Any:
    """The start model with an adapter that has moved."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    attach_adapter(model, LoraConfig(rank=4, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in adapter_weights(model).values():
            one.add_(torch.randn(one.shape, generator=generator) * 0.2)
    return model


def packed(model: Any, push: str, *, streamed: bool = False) -> Outgoing:
    config = LoraConfig(rank=4, push=push)  # type: ignore[arg-type]
    outgoing = outgoing_of(model, config, bucket_bytes=2_000, dtype=None, streamed=streamed)
    outgoing.pack()
    assert len(outgoing.plan) > 2
    return outgoing


async def drawn(service: RolloutService) -> list[protos.Trajectory]:
    """The same eight samples of whoever is asked."""
    async with channel_to(service.address) as channel, talking(protos.RolloutStub(channel).Generate) as talk:
        await talk.say(protos.GenerateRequest(leases=[lease(0, count=8)]))
        found: list[protos.Trajectory] = await talk.hear("trajectories", 8)
        return sorted(found, key=lambda one: one.key.index)


@torch.no_grad()
def assert_drawn_from(model: Any, trajectories: list[protos.Trajectory]) -> None:
    for one in trajectories:
        prompt, response = from_array(one.prompt_ids).tolist(), from_array(one.response_ids).tolist()
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)
        np.testing.assert_allclose(from_array(one.behaviour_logprobs), expected.numpy(), rtol=0, atol=1e-5)


def bits(trajectories: list[protos.Trajectory]) -> list[tuple[bytes, bytes]]:
    return [(one.response_ids.data, one.behaviour_logprobs.data) for one in trajectories]


@pytest.mark.parametrize("transport", ["gloo", "disk"])
async def test_either_push_gives_the_same_bits_and_they_are_the_trainers(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path, transport: str
) -> None:
    model = trained(model_folder)
    merged, adapter = packed(model, "merged"), packed(model, "adapter")
    assert adapter.num_bytes < merged.num_bytes / 2
    async with servers(make_config, tmp_path) as (first, second):
        whole, factors = new_pusher(merged, tmp_path / "1"), new_pusher(adapter, tmp_path / "2")
        await whole.set_members(addresses([first]))
        await factors.set_members(addresses([second]))
        for version in (1, 2):
            for pusher, service in ((whole, first), (factors, second)):
                report = await pusher.push(version, transport=transport)
                assert list(report.committed) == [service.name], dict(report.failed)
                assert await holds(service, pusher.outgoing, version)
            found = [await drawn(service) for service in (first, second)]
            assert_drawn_from(model, found[0])
            assert bits(found[0]) == bits(found[1])
            with torch.no_grad():
                for one in adapter_weights(model).values():
                    one.mul_(1.3)
            merged.pack()
            adapter.pack()
        await whole.set_members([])
        await factors.set_members([])


async def test_the_first_version_of_an_adapter_is_the_start_model(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    start: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    pusher = new_pusher(packed(attach_adapter(start, LoraConfig(rank=4)), "adapter"), tmp_path)
    async with servers(make_config, tmp_path, 1) as (service,):
        await pusher.set_members(addresses([service]))
        assert list((await pusher.push(0, transport="gloo")).committed) == [service.name]
        assert_drawn_from(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32), await drawn(service))
        await pusher.set_members([])


async def test_a_server_that_comes_late_needs_no_earlier_push(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    model = trained(model_folder)
    outgoing = packed(model, "adapter", streamed=True)
    pusher = new_pusher(outgoing, tmp_path)
    async with servers(make_config, tmp_path) as (early, late):
        await pusher.set_members(addresses([early]))
        for version in (1, 2):
            await pusher.push(version, transport="gloo")
        await pusher.set_members(addresses([early, late]))
        assert pusher.lacking(2) == [late.name]
        report = await pusher.push(2, transport="gloo", names=[late.name])
        assert list(report.committed) == [late.name] and await holds(late, outgoing, 2)
        assert bits(await drawn(late)) == bits(await drawn(early))
        await pusher.set_members([])


async def test_a_flipped_byte_of_an_adapter_is_noticed_and_sent_again(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    faults.arm("rollout-0:push.commit@1=flip")
    model = trained(model_folder)
    pusher = new_pusher(packed(model, "adapter"), tmp_path)
    async with servers(make_config, tmp_path, 1) as (service,):
        await pusher.set_members(addresses([service]))
        report = await pusher.push(1, transport="gloo")
        assert list(report.committed) == [service.name]
        assert_drawn_from(model, await drawn(service))
        await pusher.set_members([])


async def test_a_server_with_another_start_model_is_told_so_and_keeps_what_it_had(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    other = make_tiny_qwen3(tmp_path / "other", seed=2, shape=SHAPE)
    pusher = new_pusher(packed(trained(other), "adapter"), tmp_path)
    async with servers(make_config, tmp_path, 1) as (service,):
        await pusher.set_members(addresses([service]))
        report = await pusher.push(1, transport="gloo")
        assert not report.committed
        assert "is not the trainer's start model" in report.failed[service.name]
        assert_drawn_from(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32), await drawn(service))


async def test_adapters_of_some_layers_leave_the_others(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    model = trained(model_folder, target_modules=("q_proj", "down_proj"), rslora=True)
    pusher = new_pusher(packed(model, "adapter"), tmp_path)
    async with servers(make_config, tmp_path, 1) as (service,):
        await pusher.set_members(addresses([service]))
        assert list((await pusher.push(1, transport="gloo")).committed) == [service.name]
        assert_drawn_from(model, await drawn(service))
        await pusher.set_members([])
