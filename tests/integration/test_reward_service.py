"""The reward service over its stream: credit, values, typed failures, a client that goes away."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import protos
from services.config import Config
from services.errors import ConfigError
from services.reward import RewardService
from tests.integration.kit import Talk, attendance, bind, channel_to, running, talking

MakeConfig = Callable[..., Config]


@asynccontextmanager
async def reward_talk(config: Config, folder: Path) -> AsyncIterator[tuple[RewardService, Talk, Any]]:
    async with attendance() as (conductor, _):
        service = RewardService(bind("reward-0"), conductor=conductor, config=config, folder=folder)
        async with running(service), channel_to(service.address) as channel:
            stub = protos.RewardStub(channel)
            async with talking(stub.Score) as talk:
                yield service, talk, stub


def item(ticket: int, response: str, *, truth: str = "42") -> protos.ScoreItem:
    key = protos.SampleKey(group=ticket, index=0)
    return protos.ScoreItem(
        key=key, ticket=ticket, prompt="40+2=", response=response, ground_truth=truth, extra={"response_tokens": "3"}
    )


def user_function(folder: Path, body: str) -> dict[str, object]:
    path = folder / "judge.py"
    path.write_text(f"def score(item):\n    {body}\n")
    return {"functions": [{"target": f"{path}:score"}], "timeout_seconds": 1.0}


async def test_credit_comes_first_and_every_item_gives_its_own_back(make_config: MakeConfig, tmp_path: Path) -> None:
    async with reward_talk(make_config(reward={"max_pending": 10}), tmp_path) as (_, talk, _):
        await talk.say(protos.ScoreRequest(items=[item(1, "42"), item(2, "41")]))
        await talk.say(protos.ScoreRequest(items=[item(3, "42")]))
        results = {result.ticket: result for result in await talk.hear("results", 3)}
        assert talk.replies[0].credit.samples == 10 and not talk.replies[0].results
        assert talk.credit() == 10 + 3
    assert [results[ticket].value for ticket in (1, 2, 3)] == [1.0, 0.0, 1.0]
    assert results[2].key.group == 2 and results[2].route.startswith("arithmetic@")
    assert dict(results[1].breakdown) == {"arithmetic": 1.0}


@pytest.mark.parametrize(
    ("body", "failure", "message"),
    [
        ("raise KeyError('who')", protos.SCORE_FAILURE_ERROR, "KeyError"),
        ("return float('nan')", protos.SCORE_FAILURE_INVALID_VALUE, "nan"),
        ("return 'much'", protos.SCORE_FAILURE_INVALID_VALUE, "much"),
        ("import os; os._exit(9)", protos.SCORE_FAILURE_CRASH, "9"),
        ("import time; time.sleep(60)", protos.SCORE_FAILURE_TIMEOUT, "1"),
    ],
)
async def test_a_failure_has_its_type_and_is_no_zero(
    make_config: MakeConfig, tmp_path: Path, body: str, failure: int, message: str
) -> None:
    guarded = f"if item.response == 'bad':\n        {body}\n    return 1.0"
    async with reward_talk(make_config(reward=user_function(tmp_path, guarded)), tmp_path) as (_, talk, _):
        await talk.say(protos.ScoreRequest(items=[item(1, "bad"), item(2, "good")]))
        results = {result.ticket: result for result in await talk.hear("results", 2)}
    assert results[1].failure == failure and message in results[1].message
    assert (results[2].failure, results[2].value) == (protos.SCORE_FAILURE_UNSPECIFIED, 1.0)


async def test_describe_names_the_route_and_samples_that_hold(make_config: MakeConfig, tmp_path: Path) -> None:
    async with reward_talk(make_config(), tmp_path) as (service, talk, stub):
        reply = await stub.Describe(protos.DescribeRequest(), timeout=5.0)
        assert reply.route == service.route
        assert len(reply.self_tests) > 0
        items = [test.item for test in reply.self_tests]
        for ticket, one in enumerate(items):
            one.ticket = ticket
        await talk.say(protos.ScoreRequest(items=items))
        results = {result.ticket: result.value for result in await talk.hear("results", len(items))}
    assert [results[ticket] for ticket in range(len(items))] == [test.value for test in reply.self_tests]


async def test_a_client_that_goes_away_leaves_nothing_behind_and_the_next_is_served(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    async with reward_talk(make_config(), tmp_path) as (_, first, stub):
        await first.say(protos.ScoreRequest(items=[item(ticket, "42") for ticket in range(50)]))
        await first.hang_up()
        async with talking(stub.Score) as second:
            await second.say(protos.ScoreRequest(items=[item(1, "42")]))
            await second.hear("results", 1)
            await second.stream.done_writing()
        async with asyncio.timeout(5):
            while [task for task in asyncio.all_tasks() if task.get_name().startswith("stream-")]:
                await asyncio.sleep(0.005)


async def test_two_clients_get_each_its_own_answers(make_config: MakeConfig, tmp_path: Path) -> None:
    async with reward_talk(make_config(), tmp_path) as (_, one, stub), talking(stub.Score) as other:
        await one.say(protos.ScoreRequest(items=[item(1, "42")]))
        await other.say(protos.ScoreRequest(items=[item(1, "0")]))
        assert [result.value for result in await one.hear("results", 1)] == [1.0]
        assert [result.value for result in await other.hear("results", 1)] == [0.0]


async def test_a_reward_that_cannot_be_loaded_is_told_at_start(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(reward={"functions": [{"target": "./nowhere.py:score"}]})
    async with attendance() as (conductor, desk):
        service = RewardService(bind("reward-0"), conductor=conductor, config=config, folder=tmp_path)
        with pytest.raises(ConfigError, match=r"nowhere\.py"):
            await service.run()
    assert (desk.joined, desk.left) == ([], []), "who never joined does not leave"
