"""Settings of the correction from the behaviour policy to the proximal one. Imports pydantic only."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from trainer.configs.section import Section, one_of

REJECTION_STATISTICS = (
    *(f"{level}_{estimator}" for level in ("token", "seq_sum", "seq_mean") for estimator in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)


class RejectionConfig(Section):
    """A statistic of behaviour against proximal logprobs, and what it may be; what is outside is not trained on."""

    statistic: Annotated[str, AfterValidator(one_of("rejection statistic", REJECTION_STATISTICS))] = Field(
        description="LEVEL_ESTIMATOR, of each token or of a sample's counted tokens; d = proximal - behaviour logprob:"
        " k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d"
    )
    high: float = Field(gt=0, description="k2, k3: upper bound, in nats; k1: upper bound of e^k1, a ratio")
    low: float | None = Field(default=None, gt=0, description="k1: lower bound of e^k1, a ratio; null: 1 / high")

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if not self.statistic.endswith("k1"):
            if self.low is not None:
                raise ValueError(f"statistic={self.statistic!r} is never negative and has no lower bound: drop low")
        elif self.low is None and self.high <= 1:
            raise ValueError(f"high={self.high} leaves nothing between 1 / high and high: set high above 1, or low")
        elif self.low is not None and self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self


class CorrectionConfig(Section):
    """From the behaviour policy to the proximal one, for every loss; asks for one forward pass more over the batch."""

    weights: Literal["none", "token", "sequence", "geometric"] = Field(
        default="none",
        description="importance weight of every per-token loss: of the token, of the whole response (the product), or"
        " the geometric mean over the response",
    )
    bound: Literal["truncate", "mask"] = Field(
        default="truncate",
        description="weights above weight_max become weight_max (TIS), or weights outside [weight_min, weight_max]"
        " become 0 (IcePop); such tokens still count in the denominators",
    )
    weight_max: float | None = Field(default=2.0, gt=0, description="upper bound of a weight; null: none")
    weight_min: float | None = Field(default=None, gt=0, description="bound=mask: lower bound of a weight; null: none")
    normalize: bool = Field(
        default=False, description="divide bounded weights by their mean over the batch: over tokens, or over samples"
    )
    reject: tuple[RejectionConfig, ...] = Field(
        default=(),
        description="tokens or samples outside any of these leave the loss and its denominators; their rewards still"
        " count in the baseline",
    )
    second_moment: float | None = Field(
        default=None,
        gt=0,
        description="M2PO: reject the tokens of the largest squared log ratio until its mean over the others is below"
        " this, in nats^2 (0.04 in the paper); null: none",
    )

    @property
    def on(self) -> bool:
        """Whether there is anything to do."""
        return self.weights != "none" or bool(self.reject) or self.second_moment is not None

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        names = [rule.statistic for rule in self.reject]
        if self.weights == "none" and (self.normalize or self.bound == "mask"):
            raise ValueError("normalize and bound='mask' are about weights: set weights to 'token', ...")
        if self.bound == "mask" and self.weight_min is None and self.weight_max is None:
            raise ValueError("bound='mask' needs weight_min or weight_max")
        if self.weight_min is not None and self.bound != "mask":
            raise ValueError("weight_min needs bound='mask'")
        if self.weight_min is not None and self.weight_max is not None and self.weight_min >= self.weight_max:
            raise ValueError(f"weight_min={self.weight_min} must be below weight_max={self.weight_max}")
        if len(set(names)) < len(names):
            raise ValueError(f"a statistic stands twice in reject: {', '.join(names)}")
        return self
