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
        metrics=conductor.journalist.last_metrics if conductor.journalist else {},
        run_folder=str(conductor.folder.resolve()),
        num_tokens=conductor.generation.num_tokens,
        num_pushes=conductor.journalist.num_pushes if conductor.journalist else 0,
        run_seconds=conductor.journalist.seconds() if conductor.journalist else 0.0,
    )


def state_of(conductor: Conductor) -> str:
    """One word for what the run waits for; the first that applies."""
    roles = {member.role for member in conductor.roster.members.values()}
    checks = (
        ("finished", conductor.finished.is_set()),
        ("paused", conductor.paused),
        ("waiting_trainer", "trainer" not in roles),
        ("starved", "rollout" not in roles),
        ("waiting_reward", "reward" not in roles),
        ("waiting_reference", conductor.book.use_reference and "reference" not in roles),
        ("starting", conductor.book.accepted == 0),
    )
    return next((name for name, applies in checks if applies), "running")


def service_of(conductor: Conductor, member: Member) -> protos.ServiceStatus:
    ready = conductor.serves(member.name) if member.role == "rollout" else True
    return protos.ServiceStatus(
        name=member.name,
        role=member.role,
        address=member.address,
        state="serving" if ready else "joined",
        policy_version=member.policy_version,
        heartbeat_age_seconds=asyncio.get_running_loop().time() - member.last_beat,
        in_hand=in_hand(conductor, member),
        gauges=member.gauges,
    )


def in_hand(conductor: Conductor, member: Member) -> int:
    links = {
        "rollout": conductor.generation.links,
        "reward": conductor.judging.station.links,
        "reference": conductor.referring.station.links,
    }.get(member.role)
    link = links.get(member.name) if links is not None else None
    return max(link.in_hand, 0) if link is not None else 0


def lost_services(conductor: Conductor) -> list[protos.ServiceStatus]:
    return [protos.ServiceStatus(name=name, state=f"lost: {why}") for name, why in conductor.roster.lost.items()]
