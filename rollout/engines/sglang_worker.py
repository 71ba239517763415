"""What runs inside each of SGLang's scheduler processes (one for each tensor-parallel rank).

SGLang's `Engine` lets its scheduler process be replaced; ours is theirs with a subclass of their `Scheduler`:

  run_batch           stamps each token with the policy_version whose weights the batch was launched with
  handle_rpc_request  runs our commands on the scheduler's thread between two batches, the same on all ranks

The scheduler overlaps: one batch is under way on the GPU while a command runs, and its tokens are handed out later.
The stamp is put on at the launch, so they keep the version that they were sampled with.
"""

from collections.abc import Callable
from typing import Any

import torch

from rollout.engines.sglang_commands import METHOD, STATES, Reply, pack_reply
from rollout.engines.sglang_push import Push
from rollout.engines.sglang_samples import VERSIONS


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """Target of the scheduler processes; takes what SGLang's own takes."""
    from sglang.srt.managers import scheduler

    scheduler.Scheduler = with_pushes(scheduler.Scheduler)
    scheduler.run_scheduler_process(*args, **kwargs)


def with_pushes(base: Any) -> Any:
    """A subclass of SGLang's Scheduler."""

    class PushScheduler(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.offbeat = Push(self)
            super().__init__(*args, **kwargs)

        def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().run_batch(batch, *args, **kwargs)
            logits = getattr(result, "logits_output", None)
            if logits is not None:
                logits.customized_info = {VERSIONS: [self.offbeat.version] * len(batch.reqs)}
            return result

        def handle_rpc_request(self, recv_req: Any) -> Any:
            if recv_req.method != METHOD:
                return super().handle_rpc_request(recv_req)
            from sglang.srt.managers.io_struct import RpcReqOutput

            reply = agreed(self.offbeat.answer(recv_req.parameters), group=self.tp_group.cpu_group)
            return RpcReqOutput(success=reply.state in ("done", "pending"), message=pack_reply(reply))

    return PushScheduler


def agreed(reply: Reply, *, group: Any, all_reduce: Callable[..., Any] = torch.distributed.all_reduce) -> Reply:
    """The worst answer of all ranks: only that of rank 0 leaves its process. Collective."""
    own = STATES.index(reply.state)
    worst = torch.tensor(own)
    all_reduce(worst, op=torch.distributed.ReduceOp.MAX, group=group)
    state = STATES[int(worst)]
    return reply if state == reply.state else Reply(state, "on another tensor-parallel rank; its log says why")
