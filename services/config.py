"""A run's config: one schema per room, composed here. Imports no room's heavy part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from reward.config import RewardConfig
from rollout.config import RolloutConfig
from rollout.datasets.config import DataConfig
from services.configs.evaluation import EvaluationConfig
from services.configs.launch import FleetMember, LaunchConfig, Section
from services.configs.models import ReferenceConfig, TinyConfig
from services.errors import ConfigError
from services.pushes.dtypes import dtype_problem, held_dtypes
from trainer.config import ESTIMATOR, TrainerConfig
from trainer.configs.plugins import declares

if TYPE_CHECKING:
    import protos
    from rollout.datasets import PromptRow
    from services.stages.generation import NextPrompt

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
GROUP_ESTIMATORS = (
    *("grpo", "grpo_passk", "gdpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"),
    *("optimal_token_baseline", "tir_optimal_token_baseline"),
)


class RunConfig(Section):
    """What the run is."""

    name: str = Field(pattern=NAME_PATTERN, description="name of the run; its folder is <folder>/<name>")
    folder: str = Field(default="outputs", description="where run folders are made")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of sampling; the data has its own")
    num_steps: int = Field(ge=1, description="optimizer steps of the run")
    prompts_per_step: int = Field(default=32, ge=1, description="prompts (groups) in the batch of a step")
    group_size: int = Field(default=8, ge=1, le=65535, description="samples of each prompt that are trained on")
    max_staleness: int = Field(default=2, ge=0, description="versions a sample may lag behind; 0 is synchronous")
    staleness_policy: Literal["drop", "keep"] = Field(
        default="drop", description="groups that grew too old all the same: drop and count them, or keep and correct"
    )
    dynamic_sampling: int = Field(
        default=0,
        ge=0,
        description="groups of equal reward that a step drops and replaces by other prompts (DAPO), at most so many a"
        " step; after these they are trained on. 0: none",
    )
    log_every: int = Field(default=10, ge=1, description="steps between two log lines")


class ConductorConfig(Section):
    """Leases, liveness and the ledger."""

    heartbeat_seconds: float = Field(
        default=1.0, gt=0, description="how often services give a sign of life; three missed: lost"
    )
    lease_seconds: float = Field(default=120.0, gt=0, description="how long a rollout server may take for a sample")
    max_attempts: int = Field(default=4, ge=1, description="leases of a sample before it is quarantined")
    max_score_attempts: int = Field(default=2, ge=1, description="scorings of a sample before it is quarantined")
    max_logprob_mismatch: float | None = Field(
        default=None,
        gt=0,
        description="mean absolute difference of behaviour and trainer logprobs, in nats a token, above which a rollout"
        " server is taken out of rotation until it is started again; null: only a metric",
    )
    mismatch_patience: int = Field(default=3, ge=1, description="steps in a row over max_logprob_mismatch before that")
    synchronous: Literal["NORMAL", "FULL"] = Field(
        default="NORMAL", description="SQLite: NORMAL survives any dead process, FULL also a power cut"
    )
    keep_payload_steps: int = Field(
        default=100, ge=0, description="trajectories of at least so many past steps stay in the ledger"
    )


class PushConfig(Section):
    """How weights travel."""

    transport: Literal["auto", "nccl", "ipc", "gloo", "disk"] = Field(
        default="auto",
        description="tried first; auto: for each server the best that reaches it. nccl: broadcast between GPUs; ipc: on"
        " one GPU; gloo: broadcast between hosts; disk: safetensors on a shared path",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="what weights are sent as, which has to be what the engines hold; auto: trainer.dtype",
    )
    bucket_mib: float = Field(default=64.0, gt=0, description="upper bound of a bucket, in MiB")
    memory: Literal["snapshot", "streamed"] = Field(
        default="snapshot",
        description="snapshot: a second copy of the weights on the trainer's device, so that the next step runs beside"
        " the push. streamed: two buckets (and one as large for sharded weights), filled while they are sent; the next"
        " step and the step's report wait until the push is over, a server that dies is noticed by the broadcast only"
        " (nccl: at the deadline), and ipc is not used",
    )
    deadline_seconds: float = Field(default=30.0, gt=0, description="for one push to one crew")
    mode: Literal["all", "rolling"] = Field(
        default="all", description="all servers at once, or crews of max_unavailable, one crew after the other"
    )
    max_unavailable: int = Field(default=1, ge=1, description="rolling: servers that are in a push at once")
    max_version_skew: int = Field(
        default=1,
        ge=0,
        description="versions that a server may lag behind the newest one and still take leases; rolling: with 2 or"
        " more a push that is overtaken by the next version leaves out servers that stay within it",
    )
    host: str = Field(default="127.0.0.1", description="address of the trainer's interface on which ranks meet")


class Config(Section):
    """A whole run."""

    model: str | None = Field(default=None, description="folder or hub id of the start model, for every room")
    tiny: TinyConfig | None = Field(default=None, description="make the start model on the spot")
    run: RunConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    trainer: TrainerConfig
    conductor: ConductorConfig = Field(default_factory=ConductorConfig)
    push: PushConfig = Field(default_factory=PushConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)

    @property
    def use_reference(self) -> bool:
        """Whether samples need reference logprobs before they are trained on.

        A LoRA run whose reference is the start model computes them itself, with its adapter off.
        """
        own = self.trainer.lora is not None and self.reference.model is None
        asked = self.reference.enabled or self.trainer.algorithm.adv_estimator == "distillation"
        return asked or (self.trainer.algorithm.kl_use != "none" and not own)

    def models_to_make(self) -> list[tuple[TinyConfig, Path]]:
        """Models that are made on the spot, and where: the start model, the reference."""
        wanted = ((self.tiny, self.trainer.model), (self.reference.tiny, self.reference.model))
        return [(tiny, Path(folder)) for tiny, folder in wanted if tiny is not None and folder is not None]

    @property
    def compares_in_group(self) -> bool:
        """Whether a sample alone in its group teaches nothing."""
        estimator = self.trainer.algorithm.adv_estimator
        return estimator in GROUP_ESTIMATORS or declares(estimator, ESTIMATOR, "needs_group")

    @property
    def crew_size(self) -> int | None:
        """Rollout servers that are pushed to at once; None: all."""
        return self.push.max_unavailable if self.push.mode == "rolling" else None

    @property
    def run_folder(self) -> Path:
        return Path(self.run.folder).expanduser() / self.run.name

    @property
    def fleet(self) -> list[FleetMember]:
        """Every kind of rollout server, the plain kind first."""
        plain = self.launch.rollout_servers
        return ([FleetMember(count=plain)] if plain else []) + list(self.launch.fleet)

    def rollout_of(self, member: FleetMember) -> RolloutConfig:
        """The section rollout as these servers have it."""
        return RolloutConfig.model_validate(merged(self.rollout.model_dump(), member.settings()))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = self._fleet_problems() or [text for text in self._problems() if text]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _fleet_problems(self) -> list[str]:
        """Kinds of rollout servers that cannot be."""
        problems = [] if self.fleet else ["launch.rollout_servers=0 and no launch.fleet: nobody would generate"]
        for index, member in enumerate(self.launch.fleet):
            place = f"launch.fleet.{index}.rollout"
            if "sampling" in member.rollout:
                problems.append(f"{place}.sampling: how samples are drawn is the run's: set rollout.sampling")
            try:
                self.rollout_of(member)
            except ValidationError as error:
                problems += [f"{place}.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        return problems

    def _problems(self) -> list[str]:
        run, launch, algorithm = self.run, self.launch, self.trainer.algorithm
        batch = run.prompts_per_step * run.group_size
        in_group, beside = (run.group_size + 1, " and a baseline") if algorithm.with_baseline else (run.group_size, "")
        at_once = run.prompts_per_step * in_group
        sizes = [(member.count, self.rollout_of(member).max_num_seqs) for member in self.fleet]
        credit = sum(2 * count * max_num_seqs for count, max_num_seqs in sizes)
        smallest, largest = (pick(max_num_seqs for _, max_num_seqs in sizes) for pick in (min, max))
        sampling = self.rollout.sampling
        return [
            f"run.group_size=1 leaves nothing to compare with: {algorithm.adv_estimator} needs at least 2"
            if run.group_size == 1 and self.compares_in_group
            else "",
            f"run.dynamic_sampling={run.dynamic_sampling} with run.group_size=1: one sample has no other to differ from"
            if run.group_size == 1 and run.dynamic_sampling
            else "",
            f"run.prompts_per_step={run.prompts_per_step} x run.group_size={run.group_size} = {batch} samples cannot be"
            f" cut into trainer.algorithm.minibatches={algorithm.minibatches}"
            if batch % algorithm.minibatches
            else "",
            f"run.group_size={run.group_size}{beside} is larger than twice rollout.max_num_seqs={smallest}:"
            " a group would never be leased"
            if in_group > 2 * smallest
            else "",
            f"run.max_staleness=0 needs the {at_once} samples of a step at once, and the rollout servers take {credit}"
            if run.max_staleness == 0 and at_once > credit
            else "",
            f"trainer.algorithm.temperature={algorithm.temperature} differs from"
            f" rollout.sampling.temperature={sampling.temperature}: logprobs would not agree"
            if not math.isclose(algorithm.temperature, sampling.temperature) and sampling.temperature > 0
            else "",
            f"trainer.algorithm.overlong.limit={algorithm.overlong.limit} differs from"
            f" rollout.sampling.max_tokens={sampling.max_tokens}"
            if algorithm.overlong is not None and algorithm.overlong.limit != sampling.max_tokens
            else "",
            "rollout.sampling.temperature=0 draws the same sample for a whole group"
            if sampling.temperature == 0
            else "",
            "launch.share_gpu and launch.gpus both place services: say one" if launch.share_gpu and launch.gpus else "",
            *self._gdpo_problems(),
            *self._critic_problems(batch),
            *(self._rank_problems() if launch.trainer_ranks > 1 else ()),
            *self._teacher_problems(),
            dtype_problem(held_dtypes(self), push=self.push.dtype, trainer=self.trainer.dtype),
            *self.evaluation.problems(data=self.data, group_size=in_group, num_at_once=2 * largest),
            *(self._time_sharing_problems() if launch.time_sharing else ()),
        ]

    def _teacher_problems(self) -> Iterator[str]:
        """What keeps the reference from being a teacher."""
        if self.trainer.algorithm.adv_estimator == "distillation":
            yield from self.reference.teacher_problems(
                start_model=self.trainer.model, start=self.tiny, dynamic_sampling=self.run.dynamic_sampling
            )
        computed = self.use_reference or self.trainer.algorithm.kl_use != "none"
        if self.trainer.guards.kl_above is not None and not computed:
            yield "trainer.guards.kl_above looks at a KL that is not computed: set reference.enabled=true"

    def _gdpo_problems(self) -> Iterator[str]:
        """Parts of the reward that nobody gives."""
        functions = [function.label for function in self.reward.functions]
        for name in self.trainer.algorithm.gdpo_weights:
            if name.partition("/")[0] not in functions:
                yield (
                    f"trainer.algorithm.gdpo_weights names {name!r}, and the reward functions are"
                    f" {', '.join(functions)}: name one, or a part of one as FUNCTION/PART"
                )

    def _critic_problems(self, batch: int) -> Iterator[str]:
        """What keeps the critic from its updates."""
        critic = self.trainer.critic
        if critic is not None and critic.minibatches and batch % critic.minibatches:
            yield f"a step's {batch} samples cannot be cut into trainer.critic.minibatches={critic.minibatches}"
        if critic is not None and critic.warmup_steps >= self.run.num_steps:
            left = f"none of run.num_steps={self.run.num_steps} for the policy"
            yield f"trainer.critic.warmup_steps={critic.warmup_steps} leaves {left}"
        if critic is not None and critic.offload not in (None, "all") and self.launch.time_sharing:
            yield f"launch.time_sharing with trainer.critic.offload={critic.offload}: it would keep its memory, set all"

    def _rank_problems(self) -> Iterator[str]:
        """What keeps several ranks of the trainer from each other."""
        ranks, replicas = self.launch.trainer_ranks, self.trainer.parallel.replicas
        if ":" in self.trainer.device:
            yield f"launch.trainer_ranks={ranks} would all take trainer.device={self.trainer.device}: set cuda"
        if replicas and ranks % replicas:
            yield f"trainer.parallel.replicas={replicas} does not divide launch.trainer_ranks={ranks}"

    def _time_sharing_problems(self) -> Iterator[str]:
        """What keeps a card from changing hands."""
        if self.run.max_staleness:
            yield (
                f"launch.time_sharing generates or trains, never both: run.max_staleness={self.run.max_staleness} would"
                " let one run ahead of the other, set 0"
            )
        if self.trainer.offload == "none":
            yield "launch.time_sharing with trainer.offload=none: the trainer would keep its memory, set all"
        if self.push.mode == "rolling":
            yield "launch.time_sharing with push.mode=rolling: no server generates during a push, set all"
        switches = {"vllm": "enable_sleep_mode", "sglang": "enable_memory_saver"}
        for settings in map(self.rollout_of, self.fleet):
            switch = switches.get(settings.engine) if settings.device != "cpu" else None
            if switch is not None and not getattr(getattr(settings, settings.engine), switch):
                yield f"launch.time_sharing: the engine {settings.engine} sleeps only with {settings.engine}.{switch}"

    # What the conductor needs of it.

    def rules(self) -> BatchRules:
        run = self.run
        return BatchRules(
            num_steps=run.num_steps,
            prompts_per_step=run.prompts_per_step,
            max_staleness=run.max_staleness,
            staleness_policy=run.staleness_policy,
            dynamic_sampling=run.dynamic_sampling,
            min_group_samples=2 if self.compares_in_group else 1,
        )

    def sampling(self) -> protos.SamplingParams:
        import protos

        sampling = self.rollout.sampling
        return protos.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
            ignore_eos=sampling.ignore_eos,
        )

    def evaluation_sampling(self) -> protos.SamplingParams:
        """How the samples of an evaluation are drawn."""
        sampling = self.sampling()
        sampling.temperature = self.evaluation.temperature
        sampling.max_tokens = self.evaluation.max_tokens or sampling.max_tokens
        return sampling

    def prompts(self) -> NextPrompt:
        """Position in the endless prompt stream -> prompt; reads the data. ConfigError where it cannot be used."""
        from rollout.prompts import PromptStream

        stream = PromptStream(rows_of(self.data, "data"), seed=self.data.seed, shuffle=self.data.shuffle)

        def prompt_at(position: int) -> protos.Prompt:
            epoch, row = stream.at(position)
            return prompt_of(row, epoch=epoch)

        return prompt_at

    def evaluation_prompts(self) -> list[protos.Prompt]:
        """What is evaluated on, nothing where nothing is; reads the data. ConfigError where it cannot be used."""
        if not self.evaluation.every_steps:
            return []
        return [prompt_of(row) for row in rows_of(self.evaluation.prompts_of(self.data), "evaluation.data")]


class BatchRules(Section):
    """What forming a batch must know."""

    num_steps: int
    prompts_per_step: int
    max_staleness: int
    staleness_policy: str
    min_group_samples: int
    dynamic_sampling: int


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `changes` on top, section by section."""
    both = {
        key: merged(values[key], change)
        if isinstance(change, Mapping) and isinstance(values.get(key), Mapping)
        else change
        for key, change in changes.items()
    }
    return {**values, **both}


def rows_of(data: DataConfig, key: str) -> Sequence[PromptRow]:
    """The rows of a source; ConfigError, told for `key`, where it cannot be used."""
    from rollout.datasets import load_rows

    try:
        return load_rows(data).rows
    except (ValueError, OSError) as error:
        raise ConfigError([f"{key}: {error}"]) from error


def prompt_of(row: PromptRow, *, epoch: int = 0) -> protos.Prompt:
    import protos

    return protos.Prompt(
        prompt_id=row.prompt_id,
        text=row.text or "",
        messages=[protos.ChatMessage(role=role, content=content) for role, content in row.messages or ()],
        ground_truth=row.ground_truth,
        data_source=row.data_source,
        extra=dict(row.extra),
        epoch=epoch,
    )
