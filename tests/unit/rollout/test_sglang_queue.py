"""The queue of an SGLang engine, with a host that only writes down what it is told."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rollout.engine import Request
from rollout.engines.checkpoint import chosen_length, end_ids_of
from rollout.engines.sglang_model import Outline
from rollout.engines.sglang_queue import SampleQueue
from rollout.engines.sglang_samples import VERSIONS
from rollout.sampling import SamplingParams, StopReason


class Scribe:
    """Takes the place of `Host`."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[str]]] = []
        self.salts: list[str] = []

    def submit(self, samples: Sequence[dict[str, Any]], deliver: Callable[..., None]) -> None:
        self.heard.append(("submit", [sample["rid"] for sample in samples]))
        self.salts += [sample["extra_key"] for sample in samples]
        self.deliver = deliver

    def abort(self, rids: Sequence[str]) -> None:
        self.heard.append(("abort", list(rids)))

    def end(self, rid: str, ids: Sequence[int] = (5, 6)) -> None:
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [(-1.0, one, None) for one in ids],
            VERSIONS: [2] * len(ids),
        }
        self.deliver(rid, {"output_ids": list(ids), "meta_info": meta})


def queue_of(scribe: Scribe, tokenizer: Any = None, *, with_stops: bool = False) -> SampleQueue:
    outline = Outline(max_model_len=20, vocab_size=10, end_ids=frozenset({9}), tokenizer=tokenizer, listed=[], known={})
    return SampleQueue(scribe, outline, seeded=True, with_stops=with_stops)  # type: ignore[arg-type]


def request(request_id: int, **params: Any) -> Request:
    sampling = SamplingParams(**({"max_tokens": 4} | params))
    return Request(request_id=request_id, prompt_ids=(1, 2), sampling=sampling, seed=request_id)


async def test_a_sample_goes_in_and_comes_out() -> None:
    scribe = Scribe()
    queue = queue_of(scribe)
    queue.submit([request(1), request(12)])
    scribe.end("12.0.")
    (done,) = await queue.finished()
    assert (done.request_id, done.token_ids.tolist(), done.stop_reason) == (12, [5, 6], StopReason.LENGTH)
    queue.abort([1, 12, 99])
    assert scribe.heard == [("submit", ["1.0.", "12.0."]), ("abort", ["1.0."])]


async def test_the_text_is_decoded_by_the_models_tokenizer() -> None:
    class Letters:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return "".join(chr(ord("a") + one) for one in ids)

    scribe = Scribe()
    queue = queue_of(scribe, Letters())
    queue.submit([request(1)])
    scribe.end("1.0.", (0, 1))
    assert [one.text for one in await queue.finished()] == ["ab"]


async def test_a_restart_aborts_every_attempt_and_begins_it_again_in_order() -> None:
    scribe = Scribe()
    queue = queue_of(scribe)
    queue.submit([request(1), request(2)])
    assert queue.new_salt() == "1"
    queue.restart()
    assert scribe.heard[1:] == [("abort", ["1.0.", "2.0."]), ("submit", ["1.1.", "2.1."])]
    assert scribe.salts == ["0", "0", "1", "1"]
    scribe.end("1.0.", (3,))
    scribe.end("1.1.", (4,))
    assert [one.token_ids.tolist() for one in await queue.finished()] == [[4]]


async def test_what_cannot_be_generated_is_refused_whole() -> None:
    scribe = Scribe()
    queue = queue_of(scribe)
    queue.submit([request(1)])
    for bad, words in [
        (request(1), "request 1: a request of this id is unfinished"),
        (request(3, max_tokens=19), "is over max_model_len 20"),
        (request(3, stop=("x",)), "request 3: stop strings need a tokenizer"),
    ]:
        with pytest.raises(ValueError, match=words):
            queue.submit([request(2), bad])
    assert scribe.heard == [("submit", ["1.0."])]


async def test_a_failure_ends_all_waiting() -> None:
    scribe = Scribe()
    queue = queue_of(scribe)
    waiting = asyncio.create_task(queue.finished())
    await asyncio.sleep(0)
    await asyncio.to_thread(queue.fail_from_thread, "process 5 of SGLang ended with -9")
    queue.fail_from_thread("and again")
    with pytest.raises(RuntimeError, match="process 5 of SGLang ended with -9"):
        await waiting
    with pytest.raises(RuntimeError, match="ended with -9"):
        queue.submit([request(1)])
    assert queue.failed


async def test_an_answer_that_makes_no_sense_fails_the_engine() -> None:
    scribe = Scribe()
    queue = queue_of(scribe)
    queue.submit([request(1)])
    scribe.deliver("1.0.", {"output_ids": [1], "meta_info": {"finish_reason": {"type": "length"}}})
    with pytest.raises(RuntimeError, match="1 tokens, 0 logprobs and 0 versions"):
        await queue.finished()


def test_the_longest_sample() -> None:
    assert chosen_length(100, asked=None) == 100
    assert chosen_length(100, asked=40) == 40
    for limit, asked in ((100, 101), (None, None)):
        with pytest.raises(ValueError, match="max_model_len"):
            chosen_length(limit, asked=asked)


def test_end_tokens_of_all_sources() -> None:
    class Source:
        def __init__(self, eos_token_id: Any) -> None:
            self.eos_token_id = eos_token_id

    assert end_ids_of([Source(0), Source([4, 5]), Source(None), None]) == {0, 4, 5}
