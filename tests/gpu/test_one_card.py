"""One card holds trainer and engine: what sleeps or has left gives its memory back, and whole runs take turns on it."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.config import RolloutConfig
from rollout.engine import Completion, Engine, Request
from rollout.engines import load
from rollout.sampling import SamplingParams
from tests.e2e.kit import Run, assert_effectively_once, make_run
from tests.unit.trainer.test_step import trajectories
from trainer.config import AlgorithmConfig, TrainerConfig
from trainer.configs.update import OptimizerConfig
from trainer.model.load import load_model
from trainer.small.tiny import TinyShape, make_tiny_qwen3
from trainer.step import Learner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
SHAPE = TinyShape(
    hidden_size=512,
    intermediate_size=1536,
    num_layers=8,
    num_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_positions=256,
    initializer_range=0.05,
)
ENGINES = ["hf", pytest.param("vllm", marks=pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="no vLLM"))]
CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "device": "cuda",
    "max_num_seqs": 32,
    "max_model_len": 64,
    "vllm": {"gpu_memory_utilization": 0.3, "enforce_eager": True, "enable_sleep_mode": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 100 MiB of weights in float32."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("model") / "small", seed=3, shape=SHAPE)


def used_bytes() -> int:
    """Of the whole card, by every process."""
    free, total = torch.cuda.mem_get_info()
    return total - free


async def generated(engine: Engine, first: int) -> list[list[int]]:
    """Token ids of eight greedy samples."""
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    asked = [Request(request_id=first + at, prompt_ids=(3, 4, 5 + at), sampling=sampling, seed=at) for at in range(8)]
    engine.submit(asked)
    done: list[Completion] = []
    while len(done) < len(asked):
        done += await engine.finished()
    return [one.token_ids.tolist() for one in sorted(done, key=lambda one: one.request_id)]


@pytest.mark.parametrize("kind", ENGINES)
async def test_a_sleeping_engine_gives_memory_back_and_generates_the_same_when_it_wakes(kind: str, model: Path) -> None:
    config = RolloutConfig.model_validate({"model": str(model), "engine": kind, **CONFIG})
    engine: Engine = load(kind).from_pretrained(str(model), config)  # type: ignore[attr-defined]
    await engine.start()
    try:
        before = await generated(engine, 0)
        awake = used_bytes()
        await engine.sleep()
        assert awake - used_bytes() > 50 * 2**20
        await engine.wake()
        assert await generated(engine, 100) == before
    finally:
        await engine.close()


def test_what_the_trainer_offloads_frees_memory_and_changes_no_bit(model: Path) -> None:
    weights: dict[str, list[np.ndarray[Any, Any]]] = {}
    used = {}
    for mode in ("none", "optimizer", "all"):
        config = TrainerConfig.model_validate(
            {"model": str(model), "device": "cuda", "offload": mode}
            | {"optimizer": OptimizerConfig(lr=1e-3), "algorithm": AlgorithmConfig()}
        )
        gc.collect()
        before = torch.cuda.memory_allocated()
        trained = load_model(str(model), dtype="float32", attn_implementation="eager", device="cuda")
        one = Learner(trained, config)
        for step in (1, 2):
            one.train(trajectories(step), step=step, policy_version=step - 1)
            one.rest()
        torch.cuda.synchronize()
        used[mode] = torch.cuda.memory_allocated() - before
        weights[mode] = [parameter.detach().cpu().numpy().copy() for parameter in trained.parameters()]
        del one, trained
    size = sum(array.nbytes for array in weights["none"])
    assert used["none"] - used["optimizer"] > 1.9 * size, "two moments"
    assert used["optimizer"] - used["all"] > 0.9 * size, "the weights"
    for mode in ("optimizer", "all"):
        for expected, found in zip(weights["none"], weights[mode], strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.fixture
def make(tmp_path: Path, model: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def made(*overrides: str) -> Run:
        runs.append(make_run(tmp_path, *overrides, model=model))
        return runs[0].start()

    yield made
    runs[0].stop()


@pytest.mark.parametrize("kind", ENGINES)
def test_a_run_takes_turns_on_one_card(kind: str, make: Callable[..., Run]) -> None:
    run = make(
        "run.num_steps=3",
        "run.max_staleness=0",
        "launch.rollout_servers=1",
        "launch.share_gpu=true",
        "launch.time_sharing=true",
        "trainer.offload=all",
        "trainer.device=cuda",
        "trainer.memory_fraction=0.4",
        f"rollout.engine={kind}",
        "rollout.device=cuda",
        "rollout.vllm.enable_sleep_mode=true",
        "rollout.vllm.enforce_eager=true",
        "rollout.vllm.gpu_memory_utilization=0.3",
        "push.deadline_seconds=60",
    )
    run.wait(seconds=400.0)
    assert_effectively_once(run, steps=3)
    kinds = ("sleep", "trained", "push", "wake")
    found = [row for row in run.rows("events") if row["kind"] in kinds and row.get("policy_version") != 0.0]
    assert [row["kind"] for row in found][:11] == [*kinds, *kinds, *kinds][:11]
    assert {row["transport"] for row in found if row["kind"] == "push"} == {"ipc"}
