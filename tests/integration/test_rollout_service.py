"""The rollout service over its stream: leases, credit, refusals, cancels, a new stream, a drain."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import protos
from protos.arrays import from_array
from services import faults
from services.config import Config
from services.rollout import RolloutService
from services.stages.intake import all_finite, refuse
from tests.integration.kit import ENDLESS, SAMPLING, Talk, attendance, bind, channel_to, lease, running, talking, until

MakeConfig = Callable[..., Config]


@asynccontextmanager
async def rollout_talk(
    config: Config, folder: Path, overrides: Sequence[str] = ()
) -> AsyncIterator[tuple[RolloutService, Talk, Any]]:
    async with attendance() as (conductor, _):
        service = RolloutService(
            bind("rollout-0"), conductor=conductor, config=config, folder=folder, overrides=overrides
        )
        async with running(service), channel_to(service.address) as channel:
            stub = protos.RolloutStub(channel)
            async with talking(stub.Generate) as talk:
                yield service, talk, stub


async def test_credit_comes_first_and_trajectories_come_back_whole(make_config: MakeConfig, tmp_path: Path) -> None:
    async with rollout_talk(make_config(), tmp_path) as (_, talk, _):
        await talk.say(protos.GenerateRequest(leases=[lease(0), lease(1, count=3)]))
        trajectories = await talk.hear("trajectories", 5)
        assert talk.replies[0].credit.samples == 16
        assert talk.credit() == 16 + 5
        assert sum(reply.num_generated_tokens for reply in talk.replies) == sum(
            trajectory.response_ids.shape[0] for trajectory in trajectories
        )
    assert sorted((t.key.group, t.key.index) for t in trajectories) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    finite = all_finite(trajectories)
    assert [refuse(trajectory, newest_version=0, finite=finite) for trajectory in trajectories] == [""] * 5
    assert {(t.lease_id, t.attempt, t.server) for t in trajectories} == {(100, 1, "rollout-0"), (101, 1, "rollout-0")}
    assert all(span.policy_version == 0 for trajectory in trajectories for span in trajectory.spans)


async def test_the_same_seed_draws_the_same_tokens_whatever_runs_beside_it(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    async with rollout_talk(make_config(), tmp_path) as (_, talk, _):
        await talk.say(protos.GenerateRequest(leases=[lease(0, lease_id=1)]))
        first = await talk.hear("trajectories", 2)
        await talk.say(protos.GenerateRequest(leases=[lease(5, text="9+9="), lease(0, lease_id=2)]))
        again = [one for one in (await talk.hear("trajectories", 6))[2:] if one.lease_id == 2]
    tokens = [{t.key.index: from_array(t.response_ids).tolist() for t in part} for part in (first, again)]
    assert tokens[0] == tokens[1]


async def test_a_server_may_have_settings_of_its_own(make_config: MakeConfig, tmp_path: Path) -> None:
    async with rollout_talk(make_config(), tmp_path, ["rollout.max_num_seqs=3"]) as (_, talk, _):
        await talk.say(protos.GenerateRequest(leases=[lease(0)]))
        await talk.hear("trajectories", 2)
        assert talk.replies[0].credit.samples == 2 * 3


@pytest.mark.parametrize(
    ("text", "sampling"),
    [("1" * 40, SAMPLING), ("", SAMPLING), ("1+1=", protos.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=99))],
)
async def test_a_prompt_that_cannot_be_generated_from_is_refused_for_good(
    make_config: MakeConfig, tmp_path: Path, text: str, sampling: protos.SamplingParams
) -> None:
    async with rollout_talk(make_config(), tmp_path) as (service, talk, _):
        await talk.say(protos.GenerateRequest(leases=[lease(0, text=text, sampling=sampling), lease(1)]))
        nacks = await talk.hear("nacks", 2)
        await talk.hear("trajectories", 2)
        assert talk.credit() == 16 + 4
        assert service.in_hand() == 0
    assert {(nack.key.index, nack.lease_id, nack.reason, nack.permanent) for nack in nacks} == {
        (0, 100, "unfit_prompt", True),
        (1, 100, "unfit_prompt", True),
    }
    assert all(nack.detail for nack in nacks)


async def test_a_cancelled_sample_gives_its_credit_back_and_never_comes(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    async with rollout_talk(make_config(), tmp_path) as (service, talk, stub):
        await stub.Pause(protos.PauseRequest(), timeout=5.0)
        await talk.say(protos.GenerateRequest(leases=[lease(0, count=2, sampling=ENDLESS)]))
        await until(lambda: service.in_hand() == 2)
        await talk.say(protos.GenerateRequest(cancels=[protos.SampleKey(group=0, index=1)]))
        await until(lambda: talk.credit() == 16 + 1)
        await stub.Resume(protos.ResumeRequest(), timeout=5.0)
        (trajectory,) = await talk.hear("trajectories", 1)
        assert trajectory.key.index == 0
        assert talk.credit() == 16 + 2


async def test_a_new_stream_voids_what_the_old_one_had_leased(make_config: MakeConfig, tmp_path: Path) -> None:
    async with rollout_talk(make_config(), tmp_path) as (service, talk, stub):
        await stub.Pause(protos.PauseRequest(), timeout=5.0)
        await talk.say(protos.GenerateRequest(leases=[lease(0, count=4, sampling=ENDLESS)]))
        await until(lambda: service.in_hand() == 4)
        await talk.hang_up()
        async with talking(stub.Generate) as second:
            await until(lambda: second.credit() == 16)
            assert service.in_hand() == 0
            await stub.Resume(protos.ResumeRequest(), timeout=5.0)
            await second.say(protos.GenerateRequest(leases=[lease(1)]))
            found = await second.hear("trajectories", 2)
            assert {trajectory.key.group for trajectory in found} == {1}


async def test_a_drain_hands_back_what_is_not_finished(make_config: MakeConfig, tmp_path: Path) -> None:
    async with rollout_talk(make_config(), tmp_path) as (service, talk, stub):
        await stub.Pause(protos.PauseRequest(), timeout=5.0)
        await talk.say(protos.GenerateRequest(leases=[lease(0, count=3, sampling=ENDLESS)]))
        await until(lambda: service.in_hand() == 3)
        service.drain(grace_seconds=5.0)
        nacks = await talk.hear("nacks", 3)
    assert {(nack.reason, nack.permanent, nack.lease_id) for nack in nacks} == {("draining", False, 100)}


async def test_pause_stands_still_and_status_says_so(make_config: MakeConfig, tmp_path: Path) -> None:
    async with rollout_talk(make_config(), tmp_path) as (service, talk, stub):
        await stub.Pause(protos.PauseRequest(), timeout=5.0)
        await talk.say(protos.GenerateRequest(leases=[lease(0, count=2)]))
        await until(lambda: service.in_hand() == 2)
        status = await stub.Status(protos.RolloutStatusRequest(), timeout=5.0)
        assert (status.name, status.engine, status.num_running, status.serving) == ("rollout-0", "hf", 2, False)
        await stub.Resume(protos.ResumeRequest(), timeout=5.0)
        await talk.hear("trajectories", 2)


async def test_a_reply_sent_twice_and_one_that_lies_are_what_the_book_must_refuse(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    faults.arm("rollout-0:rollout.reply@1=duplicate,rollout-0:rollout.reply@2=liar")
    async with rollout_talk(make_config(), tmp_path) as (_, talk, _):
        await talk.say(protos.GenerateRequest(leases=[lease(0, count=1)]))
        first, second = await talk.hear("trajectories", 2)
        assert first == second
        await talk.say(protos.GenerateRequest(leases=[lease(1, count=1)]))
        lie = (await talk.hear("trajectories", 3))[-1]
    assert refuse(lie, newest_version=0, finite=False) == "logprobs_do_not_match_tokens"
