"""Settings of the KL to the reference policy: where it goes, how it is estimated, what leads it. Imports pydantic."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from trainer.configs.section import Section, one_of

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _kl_estimator(value: str) -> str:
    """The name here for other names of an estimator; the one that needs whole distributions is refused."""
    if value == "full":
        raise ValueError("kl_estimator='full' needs whole distributions; the reference gives sampled tokens' logprobs")
    base, plus = value.removesuffix("+"), value[len(value.removesuffix("+")) :]
    return one_of("KL estimator", KL_ESTIMATORS)(KL_ALIASES.get(base, base) + plus)


class KlSettings(Section):
    """Keys of the section algorithm that are about the KL."""

    kl_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL to the reference policy; kl_use=both: of that in the reward"
    )
    kl_use: Literal["none", "loss", "reward", "both"] = Field(
        default="none",
        description="where the KL goes: nowhere, a loss term, subtracted from token rewards, or both; both needs"
        " kl_twice",
    )
    kl_twice: bool = Field(
        default=False, description="yes, the same KL shall be counted twice: as a loss and in the reward (kl_use=both)"
    )
    kl_loss_coef: float | None = Field(
        default=None, gt=0, description="kl_use=both: weight of the KL as a loss term, beside kl_coef in the reward"
    )
    kl_estimator: Annotated[str, AfterValidator(_kl_estimator)] = Field(
        default="k3",
        description="per-token KL estimator; + takes the gradient of k2; kl, mse and low_var_kl are k1, k2 and k3",
    )
    kl_target: float | None = Field(
        default=None,
        gt=0,
        description="KL in the reward: kl_coef moves until the KL is this, in nats per token; null: kl_coef stays",
    )
    kl_horizon: int = Field(
        default=10000, ge=1, description="kl_target: samples after which kl_coef has changed by up to 20 %"
    )

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_use in ("reward", "both")

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_use in ("loss", "both")

    @property
    def kl_loss_weight(self) -> float:
        """Coefficient of the KL as a loss term; 0 where it is none."""
        return (self.kl_coef if self.kl_loss_coef is None else self.kl_loss_coef) if self.kl_in_loss else 0.0

    @model_validator(mode="after")
    def _kl_is_whole(self) -> Self:
        if self.kl_use != "none" and self.kl_coef == 0:
            raise ValueError(f"kl_use={self.kl_use!r} does nothing with kl_coef=0: set kl_coef > 0 or kl_use='none'")
        if self.kl_use == "none" and self.kl_coef > 0:
            raise ValueError(
                f"kl_coef={self.kl_coef} does nothing with kl_use='none': set kl_use to 'loss' or 'reward'"
            )
        if self.kl_target is not None and not self.kl_in_reward:
            raise ValueError("kl_target leads the KL in the reward: set kl_use='reward'")
        if self.kl_use == "reward" and self.kl_estimator.endswith("+"):
            raise ValueError(
                f"kl_estimator={self.kl_estimator!r} changes a gradient, and a reward has none: drop the +"
            )
        return self

    @model_validator(mode="after")
    def _kl_is_not_twice_by_mistake(self) -> Self:
        if self.kl_use == "both" and not self.kl_twice:
            raise ValueError(
                "kl_use='both' holds the policy to the reference twice, by its reward and by its loss, which is seldom"
                " meant: set kl_use to 'loss' or 'reward', or kl_twice=true and kl_loss_coef"
            )
        if self.kl_use == "both" and self.kl_loss_coef is None:
            raise ValueError("kl_use='both' has two weights: set kl_coef (in the reward) and kl_loss_coef (as a loss)")
        if self.kl_use != "both" and (self.kl_twice or self.kl_loss_coef is not None):
            raise ValueError("kl_twice and kl_loss_coef do nothing without kl_use='both': leave them out")
        return self
