"""The built-in engine from the event loop."""

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from rollout.config import RolloutConfig
from rollout.engine import Completion, Engine, Request
from rollout.engines import load
from rollout.engines.hf import HfEngine
from rollout.engines.hf_support import check_agreement
from rollout.sampling import SamplingParams, StopReason, VersionSpan

CONFIG = RolloutConfig(model="tiny", max_num_seqs=4, max_model_len=48, threads=1)


def request(request_id: int, prompt: Any = (3, 4, 5), **params: Any) -> Request:
    sampling = SamplingParams(**({"max_tokens": 6} | params))
    return Request(request_id=request_id, prompt_ids=prompt, sampling=sampling, seed=request_id)


async def collect(engine: Engine, count: int) -> dict[int, Completion]:
    done: list[Completion] = []
    async with asyncio.timeout(30):
        while len(done) < count:
            done += await engine.finished()
    return {one.request_id: one for one in done}


@pytest.fixture
def build_engine(build_model: Callable[..., Any], tokenizer: Any) -> Callable[..., HfEngine]:
    return lambda **changes: HfEngine(build_model(), tokenizer, CONFIG.model_copy(update=changes))


async def test_samples_come_out_with_tokens_text_and_versions(
    build_engine: Callable[..., HfEngine], tokenizer: Any
) -> None:
    engine: Engine = build_engine()
    await engine.start()
    assert engine.healthy
    engine.submit([request(at) for at in range(6)])
    done = await collect(engine, 6)
    assert sorted(done) == list(range(6))
    assert engine.policy_version == 0
    for one in done.values():
        assert one.token_ids.dtype == np.int32 and one.logprobs.dtype == np.float32
        assert one.text == tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=True)
        assert one.stop_reason in (StopReason.EOS, StopReason.LENGTH)
    await engine.close()


async def test_one_submit_to_an_idle_engine_gives_the_same_bits_again(build_engine: Callable[..., HfEngine]) -> None:
    runs = []
    for _ in range(2):
        engine = build_engine()
        await engine.start()
        engine.submit([request(at, tuple(range(3, 5 + at % 3))) for at in range(9)])
        runs.append(await collect(engine, 9))
        await engine.close()
    assert [one.logprobs.tobytes() for one in runs[0].values()] == [one.logprobs.tobytes() for one in runs[1].values()]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(8, ()), "request 8: the prompt is empty"),
        (request(8, tuple(range(3, 32)), max_tokens=20), "request 8: prompt of 29 tokens .* over max_model_len 48"),
        (request(8, (3, 32)), r"request 8: token id 32 is not in \[0, 32\)"),
        (request(8, np.array([3, -1], dtype=np.int32)), "request 8: token id -1"),
        (request(-1), "request -1: seed -1"),
        (request(1), "request 1: a request of this id is unfinished"),
    ],
)
async def test_an_invalid_request_is_refused_by_name_with_all_of_its_call(
    bad: Request, message: str, build_engine: Callable[..., HfEngine]
) -> None:
    engine = build_engine()
    await engine.start()
    with pytest.raises(ValueError, match=message):
        engine.submit([request(1), bad])
    engine.submit([request(1)])
    assert list(await collect(engine, 1)) == [1]
    await engine.close()


async def test_a_longest_possible_sample_fits(build_engine: Callable[..., HfEngine]) -> None:
    engine = build_engine()
    await engine.start()
    engine.submit([request(1, (3, 4, 5), max_tokens=45, ignore_eos=True), request(2, (3,) * 47, max_tokens=1)])
    done = await collect(engine, 2)
    assert (len(done[1].token_ids), len(done[2].token_ids)) == (45, 1)
    await engine.close()


async def test_paused_samples_wait_and_new_weights_apply_meanwhile(
    build_engine: Callable[..., HfEngine], build_model: Callable[..., Any]
) -> None:
    engine = build_engine()
    await engine.start()
    await engine.pause()
    engine.submit([request(0, ignore_eos=True)])
    await engine.load_weights(3, ((name, one.detach()) for name, one in build_model(seed=1).named_parameters()), "keep")
    assert engine.policy_version == 3
    await engine.resume()
    assert (await collect(engine, 1))[0].spans == (VersionSpan(policy_version=3, num_tokens=6),)
    await engine.close()


async def test_aborted_samples_come_out_and_their_ids_are_free_again(build_engine: Callable[..., HfEngine]) -> None:
    engine = build_engine()
    await engine.start()
    await engine.pause()
    engine.submit([request(0), request(1)])
    await engine.abort([0, 1, 77])
    done = await collect(engine, 2)
    assert {one.stop_reason for one in done.values()} == {StopReason.ABORTED}
    assert done[0].text == ""
    await engine.resume()
    engine.submit([request(0)])
    assert (await collect(engine, 1))[0].stop_reason != StopReason.ABORTED
    await engine.close()


async def test_refused_weights_reach_the_caller_and_generation_goes_on(build_engine: Callable[..., HfEngine]) -> None:
    engine = build_engine()
    await engine.start()
    with pytest.raises(ValueError, match="no parameter nonsense"):
        await engine.load_weights(1, [("nonsense", torch.zeros(1))], "keep")
    engine.submit([request(0)])
    assert (await collect(engine, 1))[0].spans[0].policy_version == 0
    assert engine.healthy
    await engine.close()


async def test_a_failure_while_generating_is_raised_out_of_finished(build_engine: Callable[..., HfEngine]) -> None:
    engine = build_engine()
    await engine.start()
    broken = [(name, torch.full(shape, torch.nan)) for name, _, shape in engine.parameters()]
    await engine.load_weights(1, broken, "keep")
    engine.submit([request(0)])
    with pytest.raises(RuntimeError, match="not finite"):
        await collect(engine, 1)
    assert not engine.healthy
    with pytest.raises(RuntimeError, match="generation has stopped"):
        engine.submit([request(1)])
    with pytest.raises(RuntimeError):
        await engine.pause()
    await engine.close()


async def test_close_wakes_whoever_waits(build_engine: Callable[..., HfEngine]) -> None:
    engine = build_engine()
    await engine.start()
    waiting = asyncio.ensure_future(engine.finished())
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        await waiting


async def test_a_stop_string_works_with_a_tokenizer_and_is_refused_without(
    build_engine: Callable[..., HfEngine], build_model: Callable[..., Any]
) -> None:
    engine = build_engine()
    await engine.start()
    engine.submit([request(at, max_tokens=20, stop=("a", "3")) for at in range(4)])
    done = await collect(engine, 4)
    stopped = [one for one in done.values() if one.stop_reason == StopReason.STOP]
    assert stopped
    assert all(one.text is not None and one.text[-1] in "a3" for one in stopped)
    await engine.close()
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        HfEngine(build_model(), None, CONFIG).submit([request(0, stop=("a",))])


async def test_a_saved_model_is_loaded_with_its_tokenizer(
    tmp_path: Path, build_model: Callable[..., Any], tokenizer: Any
) -> None:
    model = build_model()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load("hf") is HfEngine
    engine = HfEngine.from_pretrained(str(tmp_path), CONFIG.model_copy(update={"device": "cpu"}))
    await engine.start()
    engine.submit([request(0, temperature=0.0, ignore_eos=True)])
    got = await collect(engine, 1)
    ids = torch.tensor([[3, 4, 5]])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, eos_token_id=None
    )
    assert got[0].token_ids.tolist() == whole[0, 3:].tolist()
    await engine.close()


def test_models_with_other_caches_and_impossible_lengths_are_refused_at_start(build_model: Callable[..., Any]) -> None:
    sliding = MistralForCausalLM(
        MistralConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            sliding_window=8,
        )
    )
    with pytest.raises(ValueError, match="MistralForCausalLM: it needs full attention"):
        HfEngine(sliding, None, CONFIG)
    with pytest.raises(ValueError, match="max_model_len 65 is over the 64 positions"):
        HfEngine(build_model(), None, CONFIG.model_copy(update={"max_model_len": 65}))
    with pytest.raises(ValueError, match="no engine named 'nothing'; there are: hf"):
        load("nothing")


def test_the_check_at_start_passes_other_families_and_catches_a_wrong_cache(build_model: Callable[..., Any]) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32)).eval()
    check_agreement(gpt2)
    model = copy.deepcopy(build_model())
    attention = model.model.layers[1].self_attn
    attention.layer_idx = 0  # now two layers write into one
    with pytest.raises(ValueError, match="cannot serve Qwen3ForCausalLM"):
        check_agreement(model)


async def test_a_sleeping_engine_samples_nothing_and_goes_on_where_it_stood(
    build_engine: Callable[..., HfEngine],
) -> None:
    undisturbed, engine = build_engine(), build_engine()
    asked = [request(at, (3, 4, 5 + at), max_tokens=40, ignore_eos=True) for at in range(6)]
    for one in (undisturbed, engine):
        await one.start()
        one.submit(asked)
    await engine.sleep()
    assert not engine._core.busy and not engine._core._cache.num_bytes
    engine.submit([request(6)])
    await engine.sleep()  # once more changes nothing
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await engine.finished()
    await engine.wake()
    expected, found = await collect(undisturbed, 6), await collect(engine, 7)
    for at in range(6):
        assert found[at].token_ids.tolist() == expected[at].token_ids.tolist()
        np.testing.assert_allclose(found[at].logprobs, expected[at].logprobs, atol=1e-4)
    await undisturbed.close()
    await engine.close()


async def test_waking_does_not_end_a_pause(build_engine: Callable[..., HfEngine]) -> None:
    engine = build_engine()
    await engine.start()
    await engine.pause()
    engine.submit([request(0)])
    await engine.sleep()
    await engine.wake()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await engine.finished()
    await engine.resume()
    assert list(await collect(engine, 1)) == [0]
    await engine.close()
