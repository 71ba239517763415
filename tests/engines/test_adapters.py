"""Pushes that bring an adapter alone: the engine adds it to its start model, whatever it holds, fused or packed."""

from typing import Any

import pytest
import torch

from rollout.engine import TransferFailed
from tests.engines.models import changed, read_model
from tests.engines.served import Served
from tests.engines.test_pushes import assert_serves
from trainer.adapters.lora import adapter_weights, attach_adapter
from trainer.configs.lora import LoraConfig

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.filterwarnings("default")]
TARGETS = [pytest.param("all-linear", id="all"), pytest.param(("k_proj", "up_proj"), id="parts of fused layers")]


def adapted(base: Any, *, seed: int, **settings: Any) -> Any:
    """A model with an adapter that has moved far enough for other tokens."""
    model = attach_adapter(base, LoraConfig(rank=4, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in adapter_weights(model).values():
            one.add_(torch.randn(one.shape, generator=generator) * 0.3)
    return model


@pytest.mark.parametrize("targets", TARGETS)
async def test_an_adapter_is_added_to_the_start_model(served: Served, model_folder: Any, targets: Any) -> None:
    first, second = (adapted(read_model(model_folder), seed=seed, target_modules=targets) for seed in (1, 2))
    for model in (first, second, first):
        await served.push(model)
        await assert_serves(served, model)


async def test_adapters_and_whole_weights_may_follow_each_other(served: Served, model_folder: Any) -> None:
    model = adapted(read_model(model_folder), seed=3)
    await served.push(model)
    await served.push(served.base)
    await assert_serves(served, served.base)
    await served.push(model)
    await assert_serves(served, model)


async def test_an_adapter_of_another_model_is_refused(served: Served, model_folder: Any) -> None:
    with pytest.raises(TransferFailed, match="is not the trainer's start model"):
        await served.arrive(adapted(changed(model_folder, seed=9), seed=1))
    await served.dropped()
    await assert_serves(served, served.base)
