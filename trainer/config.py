"""The trainer's settings: what the run's YAML may say under `trainer`. Imports pydantic and settings only.

`TrainerConfig` holds `AlgorithmConfig` and `CheckpointConfig`, and sections of other files. The tuples below name what
exists; a test holds them to the dictionaries in `trainer.advantages` and `trainer.losses`.
"""

from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, FiniteFloat, ValidationInfo, model_validator

from trainer.configs.correction import CorrectionConfig
from trainer.configs.critic import CriticConfig
from trainer.configs.guards import GuardsConfig
from trainer.configs.kl import KlSettings
from trainer.configs.lora import LoraConfig
from trainer.configs.parallel import ParallelConfig
from trainer.configs.plugins import Kind, check, declares
from trainer.configs.section import Section, one_of
from trainer.configs.update import AGGREGATIONS, OptimizerConfig

ADVANTAGE_ESTIMATORS = (
    "grpo",
    "grpo_passk",
    "gdpo",
    "rloo",
    "opo",
    "gpg",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "gae",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "distillation",
)
POLICY_LOSSES = (
    *("vanilla", "decoupled", "gspo", "sapo", "cispo", "gpg", "geo_mean"),
    *("clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro", "bypass"),
)
ESTIMATOR = Kind(noun="advantage estimator", group="offbeat.advantages", known=ADVANTAGE_ESTIMATORS)
LOSS = Kind(noun="policy loss", group="offbeat.losses", known=POLICY_LOSSES)
CHECKED = {"checked": True}
"""Validation context of a config that was checked at the start of the run: a user's files may be on another machine."""
OffloadMode = Literal["none", "optimizer", "all"]
ATTENTION_IMPLEMENTATIONS = ("packed", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")


def _found(kind: Kind) -> Callable[[str, ValidationInfo], str]:
    """A check that the name is built in, installed, or a file with that function."""
    return lambda value, info: value if info.context == CHECKED else check(value, kind)


class OverlongConfig(Section):
    """DAPO's soft punishment of responses that near the token limit: up to -factor, in the last tokens before it."""

    limit: int = Field(
        ge=1, description="tokens of the longest response: rollout.sampling.max_tokens, which stands for it where said"
    )
    buffer: int = Field(ge=1, description="tokens before the limit over which the penalty grows from 0")
    factor: float = Field(default=1.0, gt=0, description="penalty at the limit, taken off the reward")

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer > self.limit:
            raise ValueError(f"buffer={self.buffer} is larger than limit={self.limit}: even no token would be too many")
        return self


class AlgorithmConfig(KlSettings):
    """Which estimator, which loss, and their numbers."""

    adv_estimator: Annotated[str, AfterValidator(_found(ESTIMATOR))] = Field(
        default="grpo",
        description="advantage estimator; one's own: ./file.py:function, or an entry point of group offbeat.advantages",
    )
    norm_adv_by_std: bool = Field(
        default=True,
        description="divide group advantages by the group's standard deviation; false gives Dr.GRPO (grpo, grpo_passk,"
        " gdpo)",
    )
    gamma: float = Field(
        default=1.0, gt=0, le=1, description="discount of the return per counted token (reinforce_plus_plus, gae)"
    )
    gae_lambda: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="gae: 1 takes the whole return less the critic's value, 0 the difference of neighbouring values",
    )
    gdpo_weights: dict[str, FiniteFloat] = Field(
        default_factory=dict,
        description="weight of each part of the reward that gdpo learns from, by its name in the breakdown: that of a"
        " reward function, or FUNCTION/PART",
    )
    distillation_reward_weight: float = Field(
        default=0.0,
        ge=0,
        description="distillation: weight of the task's reward, less its group's mean, beside the teacher's grades",
    )
    loss: Annotated[str, AfterValidator(_found(LOSS))] = Field(
        default="decoupled",
        description="policy loss; one's own: ./file.py:function, or an entry point of group offbeat.losses",
    )
    old_logprobs: Literal["proximal", "behaviour"] = Field(
        default="proximal",
        description="denominator of the PPO ratio: the trainer's own logprobs from before the batch's first update, "
        "or the engine's logprobs as they came (one forward less, and the clip then bounds the staleness too), which"
        " is what loss=bypass takes",
    )
    bypass_loss: Literal["ppo_clip", "reinforce"] = Field(
        default="ppo_clip",
        description="bypass: clipped PPO against the behaviour policy, or the policy gradient times correction.weights",
    )
    clip_low: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="PPO ratio is clipped below at 1 - clip_low; geo_mean: its log at -clip_low; dppo: bound on the"
        " divergence where the advantage is negative",
    )
    clip_high: float = Field(
        default=0.2,
        gt=0,
        description="PPO ratio is clipped above at 1 + clip_high; geo_mean: its log at clip_high; dppo: bound on the"
        " divergence where the advantage is positive",
    )
    clip_dual: float = Field(
        default=3.0, gt=1, description="bound on ratio where the advantage is negative; dppo: everywhere"
    )
    tau_positive: float = Field(default=1.0, gt=0, description="sapo: steepness of the gate where the advantage is > 0")
    tau_negative: float = Field(default=1.05, gt=0, description="sapo: steepness of the gate elsewhere")
    dro_beta: float | None = Field(
        default=None, gt=0, description="dro: weight of the squared log ratio; that loss cannot do without"
    )
    clip_cov_share: float = Field(
        default=0.0002,
        gt=0,
        le=1,
        description="clip_cov: share of a micro-batch's tokens without gradient, at least one",
    )
    clip_cov_low: float = Field(default=1.0, description="clip_cov: these tokens have a covariance above this")
    clip_cov_high: float = Field(default=5.0, description="clip_cov: and below this")
    kl_cov_share: float = Field(
        default=0.0002, gt=0, le=1, description="kl_cov: share of a micro-batch's tokens to penalize, at least one"
    )
    kl_cov_coef: float = Field(default=1.0, ge=0, description="kl_cov: weight of their absolute log ratio")
    loss_aggregation: Annotated[str, AfterValidator(one_of("loss aggregation", AGGREGATIONS))] = Field(
        default="token-mean",
        description="how per-token losses become one number; the policy part of sapo always takes seq-mean-token-mean,"
        " that of geo_mean the mean over samples",
    )
    loss_scale_factor: float | None = Field(
        default=None,
        gt=0,
        description="divisor of seq-mean-token-sum-norm, in tokens; null: widest response of the batch",
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    importance_cap: float | None = Field(
        default=2.0, gt=0, description="upper bound of the proximal/behaviour weight (TIS); null: not truncated"
    )
    overlong: OverlongConfig | None = Field(default=None, description="penalty of long responses; null: none")
    resample: Literal["none", "pow", "max_min", "max_random"] = Field(
        default="none",
        description="PF-PPO: draw the samples of the batch anew, once advantages are known, by chances from their"
        " rewards: |R|^resample_power; only the largest and smallest; 0.4 for the largest, 0.1 for others",
    )
    resample_power: float = Field(default=2.0, gt=0, description="resample=pow: power of the reward")
    correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="weights and rejection of off-policy tokens"
    )
    temperature: float = Field(
        default=1.0, gt=0, description="divides the logits; must equal the sampling temperature of the rollout"
    )
    epochs: int = Field(default=1, ge=1, description="passes over each batch")
    minibatches: int = Field(default=1, ge=1, description="optimizer updates per pass over the batch")
    skip_zero_advantage: bool = Field(
        default=True,
        description="leave samples whose gradient is exactly zero out of forward and backward; their logprobs, ratios, "
        "entropy and KL are then missing from the step's means",
    )

    @property
    def with_baseline(self) -> bool:
        """Whether each prompt has a greedy sample beside those that are trained on: its reward is their baseline."""
        return self.adv_estimator == "remax" or declares(self.adv_estimator, ESTIMATOR, "with_baseline")

    @model_validator(mode="after")
    def _estimator_fits(self) -> Self:
        if (self.adv_estimator == "gdpo") != bool(self.gdpo_weights):
            raise ValueError(
                "gdpo_weights are the parts of the reward that adv_estimator='gdpo' norms by themselves, e.g."
                " {gsm8k: 1, format: 0.5}: set both or neither"
            )
        if self.adv_estimator == "gdpo" and self.kl_in_reward:
            raise ValueError("adv_estimator='gdpo' looks at the parts of the reward only: set kl_use='loss'")
        if self.adv_estimator == "distillation" and self.kl_use != "none":
            raise ValueError("adv_estimator='distillation' is the KL to the reference already: set kl_use='none'")
        if self.distillation_reward_weight and self.adv_estimator != "distillation":
            raise ValueError("distillation_reward_weight does nothing without adv_estimator='distillation'")
        user_written = self.adv_estimator not in ADVANTAGE_ESTIMATORS
        if self.gamma != 1 and not user_written and self.adv_estimator not in ("reinforce_plus_plus", "gae"):
            raise ValueError(f"gamma={self.gamma} does nothing with adv_estimator={self.adv_estimator!r}: set it to 1")
        if self.gae_lambda != 1 and not user_written and self.adv_estimator != "gae":
            raise ValueError(f"gae_lambda={self.gae_lambda} does nothing without adv_estimator='gae': set it to 1")
        return self

    @model_validator(mode="before")
    @classmethod
    def _bypass_has_no_proximal_policy(cls, fields: object) -> object:
        if isinstance(fields, dict) and fields.get("loss") == "bypass":
            return {"old_logprobs": "behaviour", **fields}
        return fields

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.loss == "decoupled" and self.old_logprobs == "behaviour":
            raise ValueError("loss='decoupled' keeps proximal and behaviour apart: set old_logprobs='proximal'")
        if self.correction.on and self.old_logprobs == "behaviour" and self.loss != "bypass":
            raise ValueError("correction compares behaviour with proximal logprobs: set old_logprobs='proximal'")
        if self.correction.weights != "none" and self.loss == "decoupled":
            raise ValueError(
                "loss='decoupled' has a weight of its own (importance_cap): set loss='vanilla' or"
                " correction.weights='none'"
            )
        if self.overlong is not None and self.adv_estimator == "gdpo":
            raise ValueError("overlong shapes the reward, and adv_estimator='gdpo' reads only its parts: set one")
        return self

    @model_validator(mode="after")
    def _bypass_is_whole(self) -> Self:
        if self.loss != "bypass":
            if self.bypass_loss != "ppo_clip":
                raise ValueError(f"bypass_loss={self.bypass_loss!r} does nothing: set loss='bypass'")
            return self
        if self.old_logprobs != "behaviour":
            raise ValueError("loss='bypass' has no proximal policy: set old_logprobs='behaviour'")
        if self.correction.second_moment is not None:
            raise ValueError("loss='bypass' rejects per micro-batch, second_moment looks at the whole batch: drop it")
        if self.correction.weights != "none" and self.bypass_loss == "ppo_clip":
            raise ValueError(
                "bypass_loss='ppo_clip' has a ratio that corrects already: set correction.weights='none' or"
                " bypass_loss='reinforce'"
            )
        return self

    @model_validator(mode="after")
    def _loss_is_whole(self) -> Self:
        if self.clip_cov_low >= self.clip_cov_high:
            raise ValueError(f"clip_cov_low={self.clip_cov_low} must be below clip_cov_high={self.clip_cov_high}")
        if (self.loss == "dro") != (self.dro_beta is not None):
            raise ValueError("dro_beta is the strength of loss='dro', which has no default: set both or neither")
        if self.loss_scale_factor is not None and self.loss_aggregation != "seq-mean-token-sum-norm":
            raise ValueError("loss_scale_factor needs loss_aggregation='seq-mean-token-sum-norm'")
        return self


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept."""

    every_steps: int = Field(default=50, ge=0, description="training steps between checkpoints; 0: not by steps")
    every_minutes: float = Field(
        default=0.0,
        ge=0,
        description="a step that ends so long after the last checkpoint is saved, too; 0: not by time",
    )
    keep_last: int = Field(default=3, ge=2, description="newest checkpoints that are kept")
    keep_every: int = Field(default=0, ge=0, description="also keep each step divisible by this; 0: none")
    deadline_seconds: float = Field(
        default=1800.0, gt=0, description="a checkpoint of several ranks, and the last one of a run, fails after this"
    )


class TrainerConfig(Section):
    """The trainer room."""

    model: str = Field(min_length=1, description="folder or Hugging Face id of the start model")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="dtype of weights and optimizer state")
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto (cuda when there is one), cpu, cuda, cuda:N",
    )
    attn_implementation: Annotated[
        str, AfterValidator(one_of("attention implementation", ATTENTION_IMPLEMENTATIONS))
    ] = Field(
        default="packed",
        description="attention kernel: packed (PyTorch's own for sequences of any lengths), or one of transformers;"
        " sdpa and eager build a mask of all tokens by all tokens of a micro-batch",
    )
    max_tokens_per_microbatch: int = Field(
        default=16384, ge=1, description="tokens in one forward of a rank; a longer sample goes alone, never cut"
    )
    max_logits_mib: int = Field(default=256, ge=1, description="bound on one float32 [tokens, vocab] block, in MiB")
    gradient_checkpointing: bool = Field(default=False, description="recompute activations in backward to save memory")
    recomputed_share: float = Field(
        default=1.0, gt=0, le=1, description="gradient_checkpointing: share of the layers that recompute"
    )
    compile: bool = Field(
        default=False, description="torch.compile of each layer and of the logprobs: minutes at the start, then faster"
    )
    liger: bool = Field(
        default=False, description="Liger's Triton kernels for norms, rotary embedding and MLP; needs offbeat[liger]"
    )
    offload: OffloadMode = Field(
        default="none",
        description="what lies in host memory while it is not needed: moments between updates (optimizer), also the"
        " weights between steps (all)",
    )
    memory_fraction: float | None = Field(
        default=None, gt=0, le=1, description="share of the card's memory that the trainer may take; null: no bound"
    )
    threads: int = Field(default=0, ge=0, description="CPU threads of torch; 0: as torch finds it")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of torch, numpy and python at start")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="ranks, FSDP2 and mixed precision")
    lora: LoraConfig | None = Field(default=None, description="train low-rank adapters only; null: every weight")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="estimator, loss and their numbers")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW and its schedule")
    critic: CriticConfig | None = Field(default=None, description="value model of adv_estimator=gae; null: none")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and pruning")
    guards: GuardsConfig = Field(default_factory=GuardsConfig, description="skipped updates and alarms")

    @model_validator(mode="after")
    def _critic_is_asked(self) -> Self:
        name = self.algorithm.adv_estimator
        if name == "gae" and self.critic is None:
            raise ValueError("adv_estimator='gae' needs the values of a critic: add the section trainer.critic")
        if name != "gae" and name in ADVANTAGE_ESTIMATORS and self.critic is not None:
            raise ValueError(f"adv_estimator={name!r} takes no values: drop the section critic, or set 'gae'")
        return self
