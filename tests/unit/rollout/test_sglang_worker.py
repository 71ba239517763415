"""Commands to SGLang's processes and the stamp on its tokens, without SGLang: a small scheduler stands for it."""

from types import SimpleNamespace
from typing import Any

import pytest

from protos import TRANSPORT_NCCL, BeginPushRequest
from rollout.engines.sglang_commands import (
    STATES,
    Reply,
    pack_checksums,
    pack_reply,
    pack_request,
    unpack_checksums,
    unpack_reply,
    unpack_request,
)
from rollout.engines.sglang_push import Push
from rollout.engines.sglang_samples import VERSIONS
from rollout.engines.sglang_worker import agreed, with_pushes


class PlainScheduler:
    def run_batch(self, batch: Any) -> Any:
        return SimpleNamespace(logits_output=SimpleNamespace(customized_info=None) if batch.reqs else None)

    def handle_rpc_request(self, recv_req: Any) -> str:
        return f"its own {recv_req.method}"


def test_what_is_packed_comes_out_again() -> None:
    request = BeginPushRequest(policy_version=3, transport=TRANSPORT_NCCL, path="x:y")
    assert unpack_request(pack_request(request)) == request
    assert pack_request(request).isascii()
    for sums in ([], [0], [1, (1 << 64) - 1]):
        assert unpack_checksums(pack_checksums(sums)) == sums
    for state in STATES:
        reply = Reply(state, "a: b")
        assert unpack_reply(pack_reply(reply)) == reply


def test_sglangs_own_error_is_a_failure() -> None:
    assert unpack_reply("no attribute: offbeat") == Reply("failed", "no attribute: offbeat")


def test_a_token_carries_the_version_that_its_batch_was_launched_with() -> None:
    scheduler = with_pushes(PlainScheduler)()
    batch = SimpleNamespace(reqs=["a", "b"])
    before = scheduler.run_batch(batch)
    scheduler.offbeat.version = 8
    after = scheduler.run_batch(batch)
    assert before.logits_output.customized_info == {VERSIONS: [0, 0]}
    assert after.logits_output.customized_info == {VERSIONS: [8, 8]}
    assert scheduler.run_batch(SimpleNamespace(reqs=[])).logits_output is None


def test_other_calls_are_sglangs() -> None:
    assert with_pushes(PlainScheduler)().handle_rpc_request(SimpleNamespace(method="save")) == "its own save"


@pytest.mark.parametrize(
    ("own", "worst", "state"),
    [("done", "done", "done"), ("done", "pending", "pending"), ("pending", "failed", "failed"), ("corrupt",) * 3],
)
def test_ranks_agree_on_the_worst(own: Any, worst: Any, state: str) -> None:
    def all_reduce(tensor: Any, **_: Any) -> None:
        tensor.clamp_(min=STATES.index(worst))

    reply = agreed(Reply(own, "mine"), group=None, all_reduce=all_reduce)
    assert reply.state == state
    assert reply.text == ("mine" if own == worst else "on another tensor-parallel rank; its log says why")


def test_a_command_that_breaks_is_told_and_ends_nothing() -> None:
    push = Push(SimpleNamespace())
    assert push.answer({"word": "poll", "checksums": ""}) == Reply("failed", "no push is open")
    assert push.answer({"word": "drop"}) == Reply("done")
    assert push.answer({"word": "dance"}).state == "failed"
    told = push.answer({"word": "swap", "version": 1, "mode": "keep", "salt": "1"})
    assert told.state == "failed"
    assert push.version == 0
