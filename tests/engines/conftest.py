"""Each engine is started once for each model and shared by all tests: a start of vLLM takes many seconds."""

import gc
import importlib.util
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer

from rollout.engines import ENGINES
from tests.engines.models import changed, read_model, write_model
from tests.engines.served import Served, serve

torch.set_num_threads(1)
NEEDS = {"hf": "transformers", "vllm": "vllm", "sglang": "sglang"}


def engine_params(names: Iterable[str] = ENGINES) -> list[object]:
    """Engines as parameters of a test; those that are not installed here are skipped with the reason."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(importlib.util.find_spec(NEEDS[name]) is None, reason=f"{name} is not installed"),
        )
        for name in names
    ]


@pytest.fixture(scope="session", params=engine_params())
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", params=["tied", "untied"])
def embeddings(request: pytest.FixtureRequest) -> str:
    """Whether the output head is the input embedding."""
    return str(request.param)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, embeddings: str) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / embeddings, tied=embeddings == "tied")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(engine_name: str, model_folder: Path) -> AsyncIterator[Served]:
    """One started engine for all tests with the same parameters."""
    engine = await serve(engine_name, model_folder)
    base = read_model(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    yield Served(engine, base, changed(model_folder, seed=5), tokenizer, holds=base)
    await engine.close()
    gc.collect()


@pytest_asyncio.fixture(loop_scope="session")
async def served(shared: Served) -> Served:
    """The engine as each test finds it: well, idle, with the weights of `base`."""
    assert shared.engine.healthy, "an earlier test has broken it"
    await shared.hold(shared.base)
    return shared
