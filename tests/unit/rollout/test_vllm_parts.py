"""The parts of the engine vllm that need no vLLM: settings, environment, stop reasons, spans, links to the workers."""

import asyncio
import struct
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from protos import Manifest, TensorSpec
from protos.generated.trajectory_pb2 import DType
from rollout.config import RolloutConfig
from rollout.engine import TransferFailed
from rollout.engines.vllm_args import arguments, environment, wrong_arguments
from rollout.engines.vllm_link import HEADER, Kind, frame
from rollout.engines.vllm_links import Links
from rollout.engines.vllm_model import ModelFacts
from rollout.engines.vllm_samples import completion_of, spans_of, stop_reason_of, vllm_seed
from rollout.sampling import StopReason, VersionSpan


def config(**settings: Any) -> RolloutConfig:
    return RolloutConfig.model_validate({"model": "m", "engine": "vllm"} | settings)


def given_to_vllm(settings: RolloutConfig) -> dict[str, object]:
    return arguments(settings, own_dtype="float32")


# Settings.


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"device": "cpu", "vllm": {"enable_sleep_mode": True}}, "enable_sleep_mode"),
        ({"vllm": {"enable_sleep_mode": True, "cpu_offload_gib": 1.0}}, "cpu_offload_gib"),
        ({"max_num_seqs": 65, "vllm": {"max_num_batched_tokens": 64}}, "below max_num_seqs 65"),
        (
            {"max_model_len": 513, "vllm": {"max_num_batched_tokens": 512, "enable_chunked_prefill": False}},
            "below max_model_len 513",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_told(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        config(**settings)
    RolloutConfig.model_validate({"model": "m", "engine": "hf"} | settings)


def test_our_settings_go_under_vllms_names_and_the_users_own_beside_them() -> None:
    given = given_to_vllm(config(max_num_seqs=7, vllm={"tensor_parallel_size": 2, "engine_args": {"block_size": 32}}))
    assert (given["max_num_seqs"], given["tensor_parallel_size"], given["block_size"]) == (7, 2, 32)
    assert "enable_lora" not in given
    assert given_to_vllm(config(vllm={"enable_lora": True, "max_lora_rank": 8}))["max_lora_rank"] == 8


def test_auto_is_the_dtype_of_the_checkpoint() -> None:
    assert given_to_vllm(config())["dtype"] == "float32"
    assert given_to_vllm(config(dtype="bfloat16"))["dtype"] == "bfloat16"


def test_two_servers_draw_with_different_seeds_unless_the_user_says_one() -> None:
    seeds = {given_to_vllm(config())["seed"] for _ in range(4)}
    assert len(seeds) == 4
    assert all(isinstance(seed, int) and 0 <= seed < 1 << 31 for seed in seeds)
    assert given_to_vllm(config(vllm={"engine_args": {"seed": 5}}))["seed"] == 5


def test_an_argument_that_cannot_be_passed_on_is_told_with_the_nearest_name() -> None:
    given = {"blok_size": 1, "max_num_seqs": 2, "cpu_offload_gb": 3, "logprobs_mode": "x", "block_size": 4}
    assert wrong_arguments(given, {"block_size", "logprobs_mode", "max_num_seqs"}) == [
        "vllm.engine_args.blok_size: this vLLM has no such argument; did you mean block_size?",
        "vllm.engine_args.max_num_seqs: say it as rollout.max_num_seqs",
        "vllm.engine_args.cpu_offload_gb: say it as rollout.vllm.cpu_offload_gib",
        "vllm.engine_args.logprobs_mode is set by the engine itself",
    ]


def test_threads_bind_a_cpu_engine() -> None:
    assert "OMP_NUM_THREADS" not in environment(config())
    variables = environment(config(threads=3, vllm={"cpu_kv_cache_gib": 2}))
    assert (variables["OMP_NUM_THREADS"], variables["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "nobind")
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "2"


# Samples.


@pytest.mark.parametrize(
    ("starts", "num_tokens", "expected"),
    [
        ([(3, 0)], 5, [(3, 5)]),
        ([(3, 0), (4, 2)], 5, [(3, 2), (4, 3)]),
        ([(3, 0), (4, 0)], 5, [(4, 5)]),
        ([(3, 0), (4, 2), (5, 2), (7, 4)], 5, [(3, 2), (5, 2), (7, 1)]),
        ([(3, 0), (4, 5)], 5, [(3, 5)]),
        ([(3, 0)], 0, []),
    ],
)
def test_spans_come_from_the_first_token_of_each_version(
    starts: list[tuple[int, int]], num_tokens: int, expected: list[tuple[int, int]]
) -> None:
    wanted = tuple(VersionSpan(policy_version=version, num_tokens=count) for version, count in expected)
    assert spans_of(starts, num_tokens) == wanted


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        ("stop", None, StopReason.EOS),
        ("stop", 151643, StopReason.EOS),
        ("stop", "\n\n", StopReason.STOP),
        ("length", None, StopReason.LENGTH),
        ("abort", None, StopReason.ABORTED),
    ],
)
def test_stop_reasons(finish: str, stop: int | str | None, expected: StopReason) -> None:
    assert stop_reason_of(finish, stop) is expected


@pytest.mark.parametrize("finish", ["error", "repetition", None])
def test_what_is_no_end_of_a_sample_is_an_error(finish: str | None) -> None:
    with pytest.raises(ValueError, match="vLLM ended a sample"):
        stop_reason_of(finish, None)


def test_the_sampled_token_is_the_first_at_each_position() -> None:
    flat = SimpleNamespace(logprobs=[-0.5, -9.0, -0.25, -8.0], start_indices=[0, 2])
    output: Any = SimpleNamespace(token_ids=[7, 8], logprobs=flat, finish_reason="length", stop_reason=None)
    completion = completion_of(4, output, [(1, 0), (2, 1)])
    np.testing.assert_array_equal(completion.logprobs, np.array([-0.5, -0.25], dtype=np.float32))
    np.testing.assert_array_equal(completion.token_ids, np.array([7, 8], dtype=np.int32))
    assert [span.policy_version for span in completion.spans] == [1, 2]


def test_every_seed_is_one_that_vllm_keeps() -> None:
    assert [vllm_seed(seed) for seed in (0, 5, (1 << 63) - 1)] == [0, 5, (1 << 63) - 1]
    assert all(0 <= vllm_seed(seed) < 1 << 63 for seed in (1 << 63, (1 << 64) - 1))


def test_a_version_that_does_not_fit_the_model_is_told() -> None:
    facts = ModelFacts(dtype="float32", shapes={"a": (2, 3), "b": (4,)}, end_ids=(), tokenizer=None)

    def spec(name: str, shape: tuple[int, ...], dtype: "DType.ValueType" = DType.DTYPE_FLOAT32) -> TensorSpec:
        return TensorSpec(name=name, dtype=dtype, shape=shape)

    good = Manifest(tensors=[spec("a", (2, 3)), spec("b", (4,))])
    assert facts.mistakes(good, dtype="float32", whole=True) == []
    wrong = Manifest(tensors=[spec("a", (3, 2)), spec("c", (1,)), spec("b", (4,), DType.DTYPE_BFLOAT16)])
    assert facts.mistakes(wrong, dtype="float32", whole=False) == [
        "a has shape (3, 2), not (2, 3)",
        "the model has no parameter c",
        "b has dtype bfloat16, not float32",
    ]
    part = Manifest(tensors=[spec("b", (4,))])
    assert facts.mistakes(part, dtype="float32", whole=False) == []
    assert facts.mistakes(part, dtype="float32", whole=True) == ["a is missing"]


# Links to the workers.


class Worker:
    """The other end of a link, driven by hand."""

    async def connect(self, path: str, rank: int) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(path)
        self._writer.write(frame(Kind.HELLO, 0, b'{"rank": %d, "gpu": "GPU-%d"}' % (rank, rank)))

    async def hear(self) -> tuple[Kind, int, bytes]:
        length, kind, push = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return Kind(kind), push, await self._reader.readexactly(length)

    def say(self, kind: Kind, push: int, payload: bytes = b"") -> None:
        self._writer.write(frame(kind, push, payload))

    def leave(self) -> None:
        self._writer.close()


@pytest.fixture
async def ends(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Links, list[Worker]]]:
    """Two workers that have come, the second one first."""
    monkeypatch.setenv("OFFBEAT_VLLM_SOCKET", "")
    links, workers = Links(2), [Worker(), Worker()]
    path = await links.listen()
    for rank in (1, 0):
        await workers[rank].connect(path, rank)
    await links.ready(seconds=5)
    yield links, workers
    for worker in workers:
        worker.leave()
    await links.close()


async def opened(links: Links, workers: list[Worker]) -> int:
    opening = asyncio.create_task(links.open(b"request"))
    for worker in workers:
        kind, push, payload = await worker.hear()
        assert (kind, payload) == (Kind.OPEN, b"request")
        worker.say(Kind.OPENED, push)
    await opening
    return push


async def test_a_push_opens_and_arrives_on_every_worker_in_the_order_of_ranks(
    ends: tuple[Links, list[Worker]],
) -> None:
    links, workers = ends
    assert links.gpus == ("GPU-0", "GPU-1")
    push = await opened(links, workers)
    workers[1].say(Kind.ARRIVED, push, struct.pack("!2Q", 3, 4))
    workers[0].say(Kind.ARRIVED, push, struct.pack("!2Q", 1, (1 << 64) - 1))
    assert await links.arrived(seconds=5) == [[1, (1 << 64) - 1], [3, 4]]


async def test_a_worker_that_fails_says_why(ends: tuple[Links, list[Worker]]) -> None:
    links, workers = ends
    push = await opened(links, workers)
    workers[0].say(Kind.ARRIVED, push, struct.pack("!Q", 1))
    workers[1].say(Kind.FAILED, push, b"no route to the trainer")
    with pytest.raises(TransferFailed, match="no route to the trainer"):
        await links.arrived(seconds=5)


async def test_a_worker_that_dies_or_stays_silent_ends_the_wait(ends: tuple[Links, list[Worker]]) -> None:
    links, workers = ends
    await opened(links, workers)
    with pytest.raises(TransferFailed, match="no word of ARRIVED"):
        await links.arrived(seconds=0.01)
    workers[0].leave()
    with pytest.raises(TransferFailed, match="gone"):
        await links.arrived(seconds=5)


async def test_dropping_ends_the_wait_and_late_news_of_the_old_push_is_not_taken_for_the_next(
    ends: tuple[Links, list[Worker]],
) -> None:
    links, workers = ends
    old = await opened(links, workers)
    waiting = asyncio.create_task(links.arrived(seconds=5))
    await asyncio.sleep(0)
    dropping = asyncio.create_task(links.drop())
    for worker in workers:
        worker.say(Kind.ARRIVED, old, struct.pack("!Q", 9))
        kind, push, _ = await worker.hear()
        assert kind == Kind.DROP
        worker.say(Kind.DROPPED, push)
    await dropping
    with pytest.raises(TransferFailed, match="dropped"):
        await waiting
    new = await opened(links, workers)
    for worker in workers:
        worker.say(Kind.ARRIVED, new, struct.pack("!Q", 1))
    assert await links.arrived(seconds=5) == [[1], [1]]
