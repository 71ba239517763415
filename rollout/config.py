"""What a user may set about generation. Imports pydantic only, so that it can be checked before any heavy import."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SamplingConfig(BaseModel):
    """How the training samples are drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=1.0, ge=0.0, description="Divides the logits; 0 is greedy. No unit.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Probability mass kept per token; 1 keeps all.")
    top_k: int = Field(default=-1, ge=-1, description="Most likely tokens kept per position; -1 or 0 keeps all.")
    max_tokens: int = Field(default=512, ge=1, description="Longest response, in tokens, end-of-sequence included.")
    stop: tuple[str, ...] = Field(default=(), description="Strings whose appearance in the response ends it.")
    ignore_eos: bool = Field(default=False, description="Go on after an end-of-sequence token (for benchmarks).")


class RolloutConfig(BaseModel):
    """One rollout server: which engine, which model, how much at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="Folder or hub id of the start model (policy_version 0).")
    engine: Literal["hf"] = Field(default="hf", description="What generates; hf is built in.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Floating point type of the weights; auto takes the checkpoint's own."
    )
    device: str = Field(default="auto", description="cpu, cuda or cuda:N; auto takes cuda where there is one.")
    max_num_seqs: int = Field(default=256, ge=1, description="Samples decoded at once; more wait in order.")
    max_model_len: int | None = Field(
        default=None, ge=2, description="Longest prompt plus response, in tokens; empty takes the model's own limit."
    )
    max_prefill_tokens: int = Field(
        default=8192, ge=1, description="Prompt tokens, padding included, in one prefill pass (a longer prompt: alone)."
    )
    update_mode: Literal["keep", "recompute", "restart"] = Field(
        default="keep",
        description="Unfinished samples at a push: keep their KV cache, recompute it, or restart the samples.",
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads of the engine; empty leaves torch's own.")
    sampling: SamplingConfig = Field(default=SamplingConfig(), description="Default sampling of training samples.")
