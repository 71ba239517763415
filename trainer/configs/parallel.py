"""Settings of a trainer of several ranks. Imports pydantic only."""

from typing import Literal

from pydantic import Field

from trainer.configs.section import Section


class ParallelConfig(Section):
    """How several ranks (torchrun) share one model by FSDP2."""

    replicas: int = Field(
        default=1,
        ge=0,
        description="copies of the model, each sharded over ranks / replicas ranks (HSDP). 0: as many as ranks; nothing"
        " is sharded then, gradients are summed once an update, best for models that fit a card twice over",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="give back a layer's gathered weights after its forward and gather them again in backward: less"
        " memory, more traffic",
    )
    compute_dtype: Literal["same", "bfloat16"] = Field(
        default="same",
        description="dtype of weights in forward and backward (mixed precision beside trainer.dtype=float32); same:"
        " trainer.dtype",
    )
    reduce_dtype: Literal["same", "float32"] = Field(
        default="float32", description="dtype in which gradients are summed over ranks; same: that of the forward"
    )
    deadline_seconds: float = Field(
        default=600.0, gt=0, description="for one exchange between ranks; after it the trainer ends and is started anew"
    )

    @property
    def shards_one_rank(self) -> bool:
        """Mixed precision is FSDP2's, also where there is one rank."""
        return self.compute_dtype != "same"
