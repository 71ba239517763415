"""A version on its way from the trainer to rollout servers, by Gloo and by a shared path, and what can go wrong."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import protos
from protos.arrays import from_array
from services import faults
from services.config import Config
from services.pushes.pushing import ATTEMPTS, Pusher
from services.rollout import RolloutService
from tests.integration.kit import ENDLESS, attendance, bind, channel_to, lease, running, serving, talking, until
from trainer.pushes.outgoing import Outgoing
from trainer.pushes.weights import Broadcaster

MakeConfig = Callable[..., Config]


def outgoing_of(folder: Path, *, seed: int = 7) -> Outgoing:
    """The model with other weights than the servers have begun with, in many small buckets."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    outgoing = Outgoing(model.named_parameters(), bucket_bytes=10_000)
    outgoing.pack()
    assert len(outgoing.buffers) > 2
    return outgoing


def new_pusher(outgoing: Outgoing, folder: Path, *, incarnation: int = 1, deadline_seconds: float = 10.0) -> Pusher:
    return Pusher(
        outgoing,
        Broadcaster(host="127.0.0.1", incarnation=incarnation),
        name="trainer",
        deadline_seconds=deadline_seconds,
        update_mode="keep",
        folder=folder / "weights",
    )


@asynccontextmanager
async def servers(make_config: MakeConfig, folder: Path, count: int = 2) -> AsyncIterator[list[RolloutService]]:
    config = make_config()
    async with AsyncExitStack() as stack:
        conductor, _ = await stack.enter_async_context(attendance())
        made = [
            RolloutService(bind(f"rollout-{at}"), conductor=conductor, config=config, folder=folder)
            for at in range(count)
        ]
        for service in made:
            await stack.enter_async_context(running(service))
        yield made


def addresses(services: Sequence[RolloutService]) -> list[protos.RolloutAddress]:
    return [protos.RolloutAddress(name=service.name, address=service.address) for service in services]


async def status_of(service: RolloutService) -> protos.RolloutStatusReply:
    async with channel_to(service.address) as channel:
        return await protos.RolloutStub(channel).Status(protos.RolloutStatusRequest(), timeout=5.0)


async def holds(service: RolloutService, outgoing: Outgoing, version: int) -> bool:
    """Whether a server serves exactly these weights as this version: asked of it, and looked up in its engine."""
    status = await status_of(service)
    return (status.serving, status.policy_version, status.weights_hash) == (True, version, outgoing.hash())


@pytest.mark.parametrize("transport", ["gloo", "disk"])
async def test_a_push_brings_every_server_to_the_same_weights(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path, transport: str
) -> None:
    outgoing = outgoing_of(model_folder)
    pusher = new_pusher(outgoing, tmp_path)
    async with servers(make_config, tmp_path) as services:
        assert not (await status_of(services[0])).serving
        await pusher.set_members(addresses(services))
        for version in (1, 2):
            report = await pusher.push(version, transport=transport)
            assert sorted(report.committed) == ["rollout-0", "rollout-1"]
            assert (dict(report.failed), report.policy_version, report.num_bytes) == ({}, version, outgoing.num_bytes)
            assert 0 < report.begin_seconds < report.transfer_seconds <= report.seconds
            assert [await holds(service, outgoing, version) for service in services] == [True, True]
        await pusher.set_members([])


async def test_what_is_drawn_after_a_push_is_drawn_with_the_pushed_weights(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    outgoing = outgoing_of(model_folder)
    pusher = new_pusher(outgoing, tmp_path)
    async with servers(make_config, tmp_path, 1) as (service,), channel_to(service.address) as channel:
        await pusher.set_members(addresses([service]))
        await pusher.push(1, transport="gloo")
        async with talking(protos.RolloutStub(channel).Generate) as talk:
            await talk.say(protos.GenerateRequest(leases=[lease(0, count=2)]))
            trajectories = await talk.hear("trajectories", 2)
        await pusher.set_members([])
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    model.load_state_dict(outgoing.named_views(), strict=False)
    for trajectory in trajectories:
        assert [span.policy_version for span in trajectory.spans] == [1]
        prompt, response = from_array(trajectory.prompt_ids).tolist(), from_array(trajectory.response_ids).tolist()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)
        np.testing.assert_allclose(from_array(trajectory.behaviour_logprobs), expected.numpy(), atol=1e-4)


async def test_a_flipped_byte_is_noticed_and_sent_again(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults.arm("rollout-0:push.commit@1=flip")
    outgoing = outgoing_of(model_folder)
    pusher = new_pusher(outgoing, tmp_path)
    async with servers(make_config, tmp_path) as services:
        await pusher.set_members(addresses(services))
        report = await pusher.push(1, transport="gloo")
        assert sorted(report.committed) == ["rollout-0", "rollout-1"] and not report.failed
        assert [await holds(service, outgoing, 1) for service in services] == [True, True]
        problems = [record.facts["problems"] for record in caplog.records if record.message == "a push failed"]  # type: ignore[attr-defined]
        assert (
            len(problems) == 1 and "DATA_LOSS" in problems[0]["rollout-0"] and "buckets [0]" in problems[0]["rollout-0"]
        )
        report = await pusher.push(2, transport="gloo")
        assert sorted(report.committed) == ["rollout-0", "rollout-1"], "both are in one group again"
        await pusher.set_members([])


async def test_a_server_whose_bytes_are_always_wrong_is_evicted_and_keeps_what_it_had(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    first, second = outgoing_of(model_folder), outgoing_of(model_folder, seed=8)
    async with servers(make_config, tmp_path) as services:
        pusher = new_pusher(first, tmp_path)
        await pusher.set_members(addresses(services))
        await pusher.push(1, transport="gloo")
        faults.arm(",".join(f"rollout-0:push.commit@{attempt}=flip" for attempt in range(1, ATTEMPTS + 1)))
        pusher.outgoing = second
        report = await pusher.push(2, transport="gloo")
        assert list(report.committed) == ["rollout-1"]
        assert list(report.failed) == ["rollout-0"] and "DATA_LOSS" in report.failed["rollout-0"]
        assert pusher.members == ["rollout-1"]
        assert await holds(services[0], first, 1), "nothing was touched"
        assert await holds(services[1], second, 2)
        await pusher.set_members([])


@pytest.mark.parametrize("transport", ["gloo", "disk"])
async def test_a_dead_server_is_evicted_and_the_rest_commit(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path, transport: str
) -> None:
    outgoing = outgoing_of(model_folder)
    pusher = new_pusher(outgoing, tmp_path)
    async with serving() as dead:
        pass
    async with servers(make_config, tmp_path) as services:
        await pusher.set_members([*addresses(services), protos.RolloutAddress(name="rollout-9", address=dead)])
        report = await pusher.push(1, transport=transport)
        assert sorted(report.committed) == ["rollout-0", "rollout-1"]
        assert list(report.failed) == ["rollout-9"] and "UNAVAILABLE" in report.failed["rollout-9"]
        assert [await holds(service, outgoing, 1) for service in services] == [True, True]
        assert pusher.members == ["rollout-0", "rollout-1"]
        await pusher.set_members([])


async def test_a_server_that_begins_and_never_joins_the_group_takes_nobody_with_it(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    class Deaf(protos.RolloutServicer):
        """Takes every push and takes part in none."""

        async def BeginPush(self, request: protos.BeginPushRequest, context: object) -> protos.BeginPushReply:
            return protos.BeginPushReply()

        async def AbortPush(self, request: protos.AbortPushRequest, context: object) -> protos.AbortPushReply:
            return protos.AbortPushReply()

    outgoing = outgoing_of(model_folder)
    pusher = new_pusher(outgoing, tmp_path, deadline_seconds=1.5)
    deaf = Deaf()  # type: ignore[abstract]
    async with (
        serving(lambda server: protos.add_RolloutServicer_to_server(deaf, server)) as address,
        servers(make_config, tmp_path, 1) as services,
    ):
        await pusher.set_members([*addresses(services), protos.RolloutAddress(name="rollout-9", address=address)])
        report = await pusher.push(1, transport="gloo")
        assert (list(report.committed), list(report.failed)) == (["rollout-0"], ["rollout-9"])
        assert await holds(services[0], outgoing, 1)
        assert report.seconds < (ATTEMPTS + 2) * 1.5
        await pusher.set_members([])


async def test_an_older_incarnation_is_fenced_off(make_config: MakeConfig, model_folder: Path, tmp_path: Path) -> None:
    newer, older = outgoing_of(model_folder), outgoing_of(model_folder, seed=8)
    async with servers(make_config, tmp_path, 1) as services:
        await (new := new_pusher(newer, tmp_path, incarnation=2)).set_members(addresses(services))
        await new.push(3, transport="gloo")
        await (old := new_pusher(older, tmp_path, incarnation=1)).set_members(addresses(services))
        report = await old.push(4, transport="gloo")
        assert not report.committed
        assert "trainer incarnation 1 is fenced off by 2" in report.failed["rollout-0"]
        assert await holds(services[0], newer, 3)
        report = await new.push(5, transport="gloo")
        assert list(report.committed) == ["rollout-0"]
        await new.set_members([])


async def test_a_server_that_was_restarted_is_told_the_manifest_again(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    outgoing = outgoing_of(model_folder)
    pusher = new_pusher(outgoing, tmp_path)
    async with servers(make_config, tmp_path, 1) as (service,):
        await pusher.set_members(addresses([service]))
        await pusher.push(1, transport="gloo")
        service.start_receiving("keep")  # as a new process begins: no plan, no group, no version
        report = await pusher.push(2, transport="disk")
        assert list(report.committed) == ["rollout-0"] and await holds(service, outgoing, 2)
        await pusher.set_members([])


async def test_only_the_newest_file_of_a_disk_push_is_kept(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    pusher = new_pusher(outgoing_of(model_folder), tmp_path)
    async with servers(make_config, tmp_path, 1) as services:
        await pusher.set_members(addresses(services))
        for version in (1, 2, 3):
            await pusher.push(version, transport="disk")
        assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version_3.safetensors"]
        await pusher.set_members([])


async def test_a_path_that_a_server_does_not_share_fails_for_that_server(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    outgoing = outgoing_of(model_folder)
    async with servers(make_config, tmp_path, 1) as (service,), channel_to(service.address) as channel:
        stub = protos.RolloutStub(channel)
        begin = protos.BeginPushRequest(
            policy_version=1,
            incarnation=1,
            manifest=outgoing.manifest,
            transport=protos.TRANSPORT_DISK,
            path=str(tmp_path / "nowhere.safetensors"),
            deadline_seconds=5.0,
        )
        await stub.BeginPush(begin, timeout=5.0)
        commit = protos.CommitPushRequest(policy_version=1, incarnation=1, checksums=outgoing.checksums)
        with pytest.raises(grpc.aio.AioRpcError, match="the transfer failed: FileNotFoundError"):
            await stub.CommitPush(commit, timeout=5.0)
        with pytest.raises(grpc.aio.AioRpcError, match="no push of version 1 is open"):
            await stub.CommitPush(commit, timeout=5.0)


async def test_generation_goes_on_while_a_version_comes_in(
    make_config: MakeConfig, model_folder: Path, tmp_path: Path
) -> None:
    """Tokens of one sample by two versions: the spans say so, and the sample is whole."""
    pusher = new_pusher(outgoing_of(model_folder), tmp_path)
    async with servers(make_config, tmp_path, 1) as (service,), channel_to(service.address) as channel:
        await pusher.set_members(addresses([service]))
        stub = protos.RolloutStub(channel)
        async with talking(stub.Generate) as talk:
            version = 0
            spans: set[int] = set()
            while len(spans) < 2 and version < 50:
                await talk.say(protos.GenerateRequest(leases=[lease(version, count=4, sampling=ENDLESS)]))
                await until(lambda: service.in_hand() > 0)
                version += 1
                await pusher.push(version, transport="gloo")
                await talk.hear("trajectories", 4 * version)
                spans = {len(trajectory.spans) for trajectory in talk.heard("trajectories")[-4:]} | spans
            assert 2 in spans
            for trajectory in talk.heard("trajectories"):
                assert sum(span.num_tokens for span in trajectory.spans) == trajectory.response_ids.shape[0]
                assert [span.policy_version for span in trajectory.spans] == sorted(
                    {span.policy_version for span in trajectory.spans}
                )
        await pusher.set_members([])
