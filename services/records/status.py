"""What a conductor says of its run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import protos
from services.roster import Member

if TYPE_CHECKING:
    from services.conductor import Conductor


def status_of(conductor: Conductor) -> protos.ConductorStatusReply:
    """The run at this instant."""
    book = conductor.book
    return protos.ConductorStatusReply(
        run_id=conductor.run_id,
        state=state_of(conductor),
        step=book.trained_step,
        num_steps=conductor.config.run.num_steps,
        policy_version=book.pushed_version,
        services=[service_of(conductor, member) for member in conductor.roster.members.values()]
        + lost_services(conductor),
        ledger=book.counts(),
        staleness=dict(+book.staleness),
        metrics=conductor.journalist.last_metrics,
        run_folder=str(conductor.folder.resolve()),
        num_tokens=conductor.generation.num_tokens,
        num_pushes=conductor.journalist.num_pushes,
        run_seconds=conductor.journalist.seconds(),
        evaluation=conductor.evaluating.occasions.shown(),
    )


def state_of(conductor: Conductor) -> str:
    """One word for what the run waits for; the first that applies."""
    roles = {member.role for member in conductor.roster.members.values() if not member.evicted}
    evicted = any(member.evicted for member in conductor.roster.members.values())
    checks = (
        ("finished", conductor.finished.is_set()),
        ("paused", conductor.paused),
        ("evaluating", conductor.routing.trained_all and conductor.evaluating.sheet.open),
        ("waiting_trainer", "trainer" not in roles),
        ("rollout_evicted", "rollout" not in roles and evicted),
        ("starved", "rollout" not in roles),
        ("waiting_reward", "reward" not in roles),
        ("waiting_reference", conductor.book.use_reference and "reference" not in roles),
        ("starting", conductor.book.accepted == 0),
    )
    return next((name for name, applies in checks if applies), "running")


def service_of(conductor: Conductor, member: Member) -> protos.ServiceStatus:
    ready = conductor.routing.serves(member.name) if member.role == "rollout" else True
    idle = "asleep" if member.card == "asleep" else "joined"
    state = f"evicted: {member.evicted}" if member.evicted else "serving" if ready else idle
    return protos.ServiceStatus(
        name=member.name,
        role=member.role,
        address=member.address,
        state=state,
        policy_version=member.policy_version,
        heartbeat_age_seconds=asyncio.get_running_loop().time() - member.last_beat,
        in_hand=conductor.stages[member.role].in_hand(member.name),
        gauges=member.gauges,
        logprob_diff_mean=member.logprob_diff_mean,
    )


def lost_services(conductor: Conductor) -> list[protos.ServiceStatus]:
    return [protos.ServiceStatus(name=name, state=f"lost: {why}") for name, why in conductor.roster.lost.items()]
