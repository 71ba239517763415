"""The reference service over its stream: logprobs of the frozen model, errors as data."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import protos
from protos.arrays import from_array, to_array
from services.config import Config
from services.reference import CREDIT_SAMPLES, ReferenceService
from tests.integration.kit import Talk, attendance, bind, channel_to, running, talking

MakeConfig = Callable[..., Config]


@asynccontextmanager
async def reference_talk(config: Config, folder: Path) -> AsyncIterator[Talk]:
    async with attendance() as (conductor, _):
        service = ReferenceService(bind("reference-0"), conductor=conductor, config=config, folder=folder)
        async with (
            running(service),
            channel_to(service.address) as channel,
            talking(protos.ReferenceStub(channel).LogProbs) as talk,
        ):
            yield talk


def ids(*values: int) -> protos.Array:
    return to_array(np.array(values, np.int32))


def item(ticket: int, prompt: protos.Array, response: protos.Array) -> protos.LogProbItem:
    return protos.LogProbItem(ticket=ticket, prompt_ids=prompt, response_ids=response)


def plain_logprobs(folder: Path, prompt: list[int], response: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)


async def test_the_logprobs_are_those_of_a_plain_forward(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    prompts, responses = [[3, 4, 5], [6]], [[7, 8], [9, 10, 11, 12]]
    async with reference_talk(make_config(), tmp_path) as talk:
        items = [item(at, ids(*prompts[at]), ids(*responses[at])) for at in range(2)]
        await talk.say(protos.LogProbRequest(items=items))
        results = {result.ticket: result for result in await talk.hear("results", 2)}
        assert talk.replies[0].credit.samples == CREDIT_SAMPLES
        assert talk.credit() == CREDIT_SAMPLES + 2
    for at in range(2):
        expected = plain_logprobs(model_folder, prompts[at], responses[at])
        np.testing.assert_allclose(from_array(results[at].logprobs), expected.numpy(), rtol=1e-4, atol=1e-5)


async def test_a_bad_item_is_an_error_of_its_own_and_the_others_are_answered(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    good = ids(3, 4)
    bad = {
        1: (good, ids()),
        2: (ids(), good),
        3: (good, to_array(np.array([3, 4], np.int64))),
        4: (good, protos.Array(dtype=protos.DTYPE_INT32, shape=[3], data=b"\0" * 8)),
        5: (good, ids(3, 1_000_000)),
        6: (ids(-1), good),
    }
    async with reference_talk(make_config(), tmp_path) as talk:
        items = [item(ticket, prompt, response) for ticket, (prompt, response) in bad.items()]
        await talk.say(protos.LogProbRequest(items=[*items, item(7, good, good)]))
        results = {result.ticket: result for result in await talk.hear("results", 7)}
        assert [ticket for ticket, result in sorted(results.items()) if not result.error] == [7]
        assert "response_ids is empty" in results[1].error and "int32" in results[3].error
        assert "does not know" in results[5].error and "does not know" in results[6].error
        await talk.say(protos.LogProbRequest(items=[item(8, good, good)]))
        assert (await talk.hear("results", 8))[-1].error == "", "the service lives"


async def test_a_client_that_goes_away_keeps_nobody_else_waiting(make_config: MakeConfig, tmp_path: Path) -> None:
    async with reference_talk(make_config(), tmp_path) as talk:
        await talk.say(protos.LogProbRequest(items=[item(1, ids(3), ids(4))] * 20))
        await talk.hang_up()
    async with reference_talk(make_config(), tmp_path) as talk:
        await talk.say(protos.LogProbRequest(items=[item(1, ids(3), ids(4))]))
        await talk.hear("results", 1)
