"""What `offbeat train` starts on this box, and where. Imports pydantic only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["conductor", "rollout", "reward", "reference", "trainer"]


class Section(BaseModel):
    """Unknown fields are refused, values stay as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FleetMember(Section):
    """Further rollout servers of one kind, beside those of launch.rollout_servers."""

    count: int = Field(default=1, ge=1, description="processes")
    engine: str | None = Field(default=None, description="what generates; null: rollout.engine")
    rollout: dict[str, Any] = Field(
        default_factory=dict, description="settings of the section rollout that these servers have otherwise"
    )
    python: str | None = Field(
        default=None, description="Python that runs them; null: launch.python.rollout, if that is for the same engine"
    )

    def settings(self) -> dict[str, Any]:
        """What differs from the section rollout."""
        return self.rollout | ({} if self.engine is None else {"engine": self.engine})


class LaunchConfig(Section):
    """What `offbeat train` starts on this box."""

    rollout_servers: int = Field(default=1, ge=0, description="rollout processes as the section rollout says")
    fleet: tuple[FleetMember, ...] = Field(default=(), description="further rollout processes of other kinds")
    reward_servers: int = Field(default=1, ge=1, description="reward processes")
    reference_servers: int = Field(default=1, ge=1, description="reference processes, where a reference is used")
    host: str = Field(default="127.0.0.1", description="address that the services listen on")
    conductor_port: int = Field(default=0, ge=0, le=65535, description="0 takes a free port")
    max_restarts: int = Field(default=20, ge=0, description="restarts of dead processes before the run is given up")
    trainer_ranks: int = Field(
        default=1,
        ge=1,
        description="processes of the trainer, which share the model by FSDP2 (trainer.parallel). Each takes a GPU of"
        " its own, the first ones of this box, and each rollout server its own next ones; where there are too few all"
        " services share what there is, with one rank",
    )
    share_gpu: bool = Field(
        default=False,
        description="trainer and rollout servers are placed on the same GPUs, also where there are more; one GPU is"
        " always shared",
    )
    time_sharing: bool = Field(
        default=False,
        description="who shares a GPU takes turns: rollout servers sleep while the trainer works; needs"
        " run.max_staleness=0 and trainer.offload",
    )
    gpus: dict[str, tuple[int, ...]] = Field(
        default_factory=dict,
        description="GPUs, counted from 0, by role or service, e.g. {trainer: [0], rollout: [1, 2], rollout-2: [0]};"
        " a service that is not named sees all. Empty: placed in order",
    )
    python: dict[Role, str] = Field(
        default_factory=dict,
        description="Python that runs a role, e.g. rollout: .venv-vllm/bin/python; offbeat is installed there too."
        " A role that is not named runs in the Python of this command; a rollout server whose engine is not installed"
        " here runs in .venv-ENGINE, where that exists",
    )
