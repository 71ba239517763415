"""What does not fit together ends a trainer at its start with one sentence, on every rank."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.config import Config
from services.errors import Broken, OffbeatError
from services.ranks.rank import follow
from services.trainer import TrainerService
from tests.integration.conftest import SHAPE
from tests.integration.kit import attendance, bind, running
from trainer.parallel.orders import Orders
from trainer.parallel.start import Seat
from trainer.small.tiny import make_tiny_qwen3

MakeConfig = Callable[..., Config]


async def refusal(config: Config, folder: Path) -> str:
    """What a trainer says that cannot start."""
    async with attendance() as (conductor, _):
        service = TrainerService(bind("trainer"), conductor=conductor, config=config, folder=folder)
        with pytest.raises(OffbeatError) as told:
            await asyncio.wait_for(service.run(), 30)
    assert type(told.value) is OffbeatError
    return str(told.value)


def changed(config: Config, **trainer: object) -> Config:
    """With these settings of the section trainer."""
    values = config.model_dump(mode="json")
    values["trainer"] |= trainer
    return Config.model_validate(values)


async def test_a_checkpoint_of_another_model_is_told(make_config: MakeConfig, tmp_path: Path) -> None:
    async with attendance() as (conductor, _):
        service = TrainerService(bind("trainer"), conductor=conductor, config=make_config(), folder=tmp_path)
        async with running(service):
            await (await service._save())
    other = make_tiny_qwen3(tmp_path / "other", seed=1, shape=replace(SHAPE, hidden_size=48))
    told = await refusal(changed(make_config(), model=str(other)), tmp_path)
    assert "step_0: " in told and "the model has" in told


async def test_a_lora_target_that_does_not_exist_is_told(make_config: MakeConfig, tmp_path: Path) -> None:
    told = await refusal(changed(make_config(), lora={"target_modules": ["q_prj"]}), tmp_path)
    assert told.startswith("trainer.lora.target_modules: no linear layer is named 'q_prj'; did you mean 'q_proj'?")


async def test_engines_that_take_the_checkpoints_own_dtype_are_told(make_config: MakeConfig, tmp_path: Path) -> None:
    told = await refusal(changed(make_config(), dtype="bfloat16"), tmp_path)
    assert told.startswith("rollout servers hold float32") and told.endswith("set push.dtype=float32")


def test_another_rank_tells_it_too(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchrun of one's own, whose number of ranks the config does not know."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    config = changed(make_config(), parallel={"replicas": 3}, device="cpu").model_dump(mode="json")

    def lead() -> None:
        orders = Orders(Seat(rank=0, size=2, local_rank=0))
        orders.give("load", json.dumps([config, str(tmp_path)]).encode())
        over.wait(30)

    over = threading.Event()
    leading = threading.Thread(target=lead)
    leading.start()
    try:
        with pytest.raises(OffbeatError, match="replicas=3 does not divide 2 ranks") as told:
            follow(Seat(rank=1, size=2, local_rank=1))
    finally:
        over.set()
        leading.join()
    assert not isinstance(told.value, Broken)
