"""Weighted sums, breakdowns and routes; and a start that refuses what would score wrongly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from reward.config import RewardConfig
from reward.function import Failure, Outcome, RewardError, Score, ScoreItem
from reward.functions import FUNCTIONS
from reward.scorer import Scorer


@asynccontextmanager
async def started(*functions: dict[str, Any], **limits: Any) -> AsyncIterator[Scorer]:
    async with Scorer(RewardConfig.model_validate({"functions": functions, **limits})) as scorer:
        yield scorer


def item(response: str, ground_truth: str = "72") -> ScoreItem:
    return ScoreItem(prompt="q", response=response, ground_truth=ground_truth)


async def test_the_total_is_the_weighted_sum_and_the_breakdown_holds_values_and_parts(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(item):\n    return {'score': 0.5, 'words': len(item.response.split())}\n")
    async with started(
        {"target": "gsm8k", "weight": 2.0}, {"target": f"{tmp_path}/f.py:f", "name": "mine", "weight": -1.0}
    ) as scorer:
        outcomes = await scorer.score([item("so #### 72"), item("#### 7")])
    assert outcomes == [
        Score(1.5, {"gsm8k": 1.0, "mine": 0.5, "mine/words": 3.0}, "72"),
        Score(-0.5, {"gsm8k": 0.0, "mine": 0.5, "mine/words": 2.0}, "7"),
    ]


async def test_one_failing_function_fails_the_item_and_is_named() -> None:
    async with started({"target": "format"}, {"target": "gsm8k"}) as scorer:
        bad, good = await scorer.score([item("#### 72", ground_truth=""), item("#### 72")])
    assert isinstance(bad, Failure)
    assert bad.kind == "error"
    assert bad.message.startswith("gsm8k: ValueError: ground_truth has no number (gsm8k.py, line ")
    assert good == Score(2.0, {"format": 1.0, "gsm8k": 1.0}, "72")


async def test_the_total_is_clipped_and_the_breakdown_is_not() -> None:
    async with started({"target": "gsm8k", "weight": 10.0}, reward_clip=(-1.0, 1.5)) as scorer:
        assert await scorer.score([item("#### 72")]) == [Score(1.5, {"gsm8k": 1.0}, "72")]


async def test_the_answer_is_that_of_the_first_function_that_reads_one(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "def ours(item):\n    return {'score': 0.0, 'answer': item.response.upper()}\n"
        "def verl(solution_str, ground_truth):\n    return {'score': 0.0, 'pred': solution_str[0], 'acc': True}\n"
    )
    ours, verl = ({"target": f"{tmp_path}/f.py:{name}"} for name in ("ours", "verl"))
    async with started({"target": "format"}, ours, verl) as scorer:
        (outcome,) = await scorer.score([item("ab")])
    assert outcome == Score(0.0, {"format": 0.0, "ours": 0.0, "verl": 0.0, "verl/acc": 1.0}, "AB")
    async with started({"target": "format"}, verl) as scorer:
        (outcome,) = await scorer.score([item("ab")])
    assert outcome == Score(0.0, {"format": 0.0, "verl": 0.0, "verl/acc": 1.0}, "a")
    async with started({"target": "gsm8k"}) as scorer:
        (outcome,) = await scorer.score([item("no number")])
    assert outcome == Score(0.0, {"gsm8k": 0.0}, ""), "it looked and found none"


async def test_a_sum_that_does_not_fit_float32_is_an_invalid_value() -> None:
    async with started({"target": "gsm8k", "weight": 1e300}) as scorer:
        (outcome,) = await scorer.score([item("#### 72")])
    assert isinstance(outcome, Failure)
    assert outcome.kind == "invalid_value"
    assert "weighted sum" in outcome.message


async def test_routes_and_description_say_what_was_loaded() -> None:
    async with started({"target": "gsm8k"}, {"target": "length", "parameters": {"factor": 0.5}}) as scorer:
        gsm8k, length = scorer.describe()
        assert scorer.routes == ["gsm8k@1", f"length@{length.version}"]
    assert length.version.startswith("1+")
    assert gsm8k.self_test == FUNCTIONS["gsm8k"].self_test
    assert (length.weight, length.parameters) == (1.0, {"factor": 0.5})


async def test_a_scorer_that_is_not_started_says_so() -> None:
    scorer = Scorer(RewardConfig.model_validate({"functions": [{"target": "gsm8k"}]}))
    with pytest.raises(RewardError, match="not started"):
        scorer.describe()
    with pytest.raises(RewardError, match="not started"):
        await scorer.score([item("#### 72")])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def f(item): return 0.0", "self-test sample 2 of f failed: expected 1, got 0; response 'good'"),
        ("def f(item): return None", "self-test sample 1 of f failed: returned None"),
        ("def f(item): return item.lenght", "self-test sample 1 of f failed: AttributeError"),
        ("def f(item): raise SystemExit(3)", "worker exited with code 3 while self-test sample 1 of f"),
        ("import os\ndef f(item): os.abort()", r"worker was killed by SIGABRT \(6\) while self-test sample 1 of f"),
        ("def f(item):\n    while True: pass", "not ready after 1 s, while self-test sample 1 of f"),
        ("import time\ntime.sleep(60)", "not ready after 1 s, while loading f"),
        ("raise RuntimeError('no\\nway')", r"reward function 'f': f\.py does not load: RuntimeError: no\\nway"),
        ("def g(item): return 1.0", r"reward function 'f': f\.py has no function 'f'"),
    ],
)
async def test_a_start_is_refused_with_the_function_and_the_sample_and_leaves_no_process(
    tmp_path: Path, code: str, words: str
) -> None:
    samples = "SELF_TEST = [({'response': 'bad'}, 0.0), ({'response': 'good'}, 1.0)]"
    (tmp_path / "f.py").write_text(f"{code}\n{samples}\n")
    functions = [{"target": f"{tmp_path}/f.py:f"}]
    scorer = Scorer(RewardConfig.model_validate({"functions": functions, "start_timeout_seconds": 1.0}))
    with pytest.raises(RewardError, match=words):
        await scorer.start()
    assert scorer.pool.pids == []
    with pytest.raises(RewardError, match="closed"):
        await scorer.score([item("x")])


async def test_with_parameters_of_its_own_a_function_must_score_its_samples_with_any_value(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(item, *, to=1): return 1 / to\nSELF_TEST = [({'response': ''}, 1.0)]\n")
    target = f"{tmp_path}/f.py:f"
    async with started({"target": target, "parameters": {"to": 4}}) as scorer:
        assert await scorer.score([ScoreItem(prompt="", response="")]) == [Score(0.25, {"f": 0.25})]
    with pytest.raises(RewardError, match="sample 1 of f failed: ZeroDivisionError"):
        async with started({"target": target, "parameters": {"to": 0}}):
            pass


async def test_async_functions_are_awaited(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "import asyncio\nasync def f(item):\n    await asyncio.sleep(0)\n    return float(len(item.response))\n"
    )
    async with started({"target": f"{tmp_path}/f.py:f"}) as scorer:
        assert await scorer.score([item("ab"), item("abc")]) == [Score(2.0, {"f": 2.0}), Score(3.0, {"f": 3.0})]


def test_it_works_on_uvloop_as_the_services_run_it(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "import os\ndef f(item):\n    if item.response == 'abort': os.abort()\n"
        "    while item.response == 'hang': pass\n    return 1.0\n"
    )

    async def run() -> list[Outcome]:
        async with started({"target": f"{tmp_path}/f.py:f"}, timeout_seconds=0.5) as scorer:
            items = [item(response) for response in ("a", "abort", "b", "hang", "c")]
            return await scorer.score(items)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(run())
    assert [outcome.kind if isinstance(outcome, Failure) else outcome.value for outcome in outcomes] == [
        *(1.0, "crash", 1.0, "timeout", 1.0)
    ]
