"""What a user may set about generation. Imports pydantic only, so that it can be checked before any heavy import."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

EngineArg = bool | int | float | str | list[str] | dict[str, bool | int | float | str] | None


class SamplingConfig(BaseModel):
    """How the training samples are drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=1.0, ge=0.0, description="Divides the logits; 0 is greedy. No unit.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Probability mass kept per token; 1 keeps all.")
    top_k: int = Field(default=-1, ge=-1, description="Most likely tokens kept per position; -1 or 0 keeps all.")
    max_tokens: int = Field(default=512, ge=1, description="Longest response, in tokens, end-of-sequence included.")
    stop: tuple[str, ...] = Field(default=(), description="Strings whose appearance in the response ends it.")
    ignore_eos: bool = Field(default=False, description="Go on after an end-of-sequence token (for benchmarks).")


class VllmConfig(BaseModel):
    """Settings of the engine vllm."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor_parallel_size: int = Field(default=1, ge=1, description="Cards that one copy of the model is cut over.")
    data_parallel_size: int = Field(default=1, ge=1, description="Copies of the model in this server.")
    gpu_memory_utilization: float = Field(
        default=0.85,
        gt=0.0,
        le=1.0,
        description="Share of each card's memory that vLLM takes; a push lands in the rest: a copy of the weights.",
    )
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="Tokens in one step, prefill and decode together; empty takes vLLM's choice."
    )
    enable_chunked_prefill: bool = Field(default=True, description="Long prompts are prefilled over several steps.")
    enable_prefix_caching: bool = Field(
        default=True, description="Equal prompts share their KV cache; never across policy versions."
    )
    enforce_eager: bool = Field(default=False, description="No CUDA graphs and no compilation: a faster start.")
    enable_lora: bool = Field(default=False, description="Room for LoRA adapters beside the weights.")
    max_lora_rank: int = Field(default=16, ge=1, description="Highest rank of an adapter.")
    enable_sleep_mode: bool = Field(
        default=False, description="Can give the card's memory back for a while (one card for trainer and engine)."
    )
    per_sample_seeds: bool = Field(
        default=False,
        description="A sample's tokens depend on its own seed; with vLLM's older model runner this costs much time.",
    )
    cpu_kv_cache_gib: int = Field(default=1, ge=1, description="Memory of the KV cache on a CPU, in GiB.")
    cpu_offload_gib: float = Field(default=0.0, ge=0.0, description="Weights kept in the host's memory, in GiB a card.")
    engine_args: dict[str, EngineArg] = Field(
        default_factory=dict, description="Any further argument of vLLM's engine, by its name in vLLM's EngineArgs."
    )


class SglangConfig(BaseModel):
    """Settings of the engine sglang."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor_parallel_size: int = Field(default=1, ge=1, description="Cards that the model is cut over.")
    mem_fraction_static: float = Field(
        default=0.8,
        gt=0.0,
        lt=1.0,
        description="Share of each card's memory for weights and KV cache; a push lands in the rest: a second copy.",
    )
    attention_backend: str | None = Field(
        default=None, description="Such as fa3 or triton; empty takes SGLang's choice."
    )
    sampling_backend: Literal["flashinfer", "pytorch"] | None = Field(
        default=None, description="Empty takes SGLang's choice."
    )
    disable_cuda_graph: bool = Field(default=False, description="No CUDA graphs: a faster start, slower decoding.")
    cuda_graph_max_bs: int | None = Field(
        default=None, ge=1, description="Largest decode batch with a CUDA graph; empty takes SGLang's choice."
    )
    chunked_prefill_size: int | None = Field(
        default=None, description="Prompt tokens in one step; -1 prefills whole; empty takes SGLang's choice."
    )
    enable_memory_saver: bool = Field(
        default=False, description="Can give the card's memory back for a while (one card for trainer and engine)."
    )
    deterministic: bool = Field(
        default=False, description="A sample's tokens depend on its own seed, not on its neighbours; slower."
    )
    stop_strings: bool = Field(
        default=True, description="Samples may have stop strings; without them SGLang needs no tokenizer and is faster."
    )
    engine_args: dict[str, EngineArg] = Field(
        default_factory=dict, description="Any further argument of SGLang's engine, by its name in SGLang's ServerArgs."
    )


class RolloutConfig(BaseModel):
    """One rollout server: which engine, which model, how much at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="Folder or hub id of the start model (policy_version 0).")
    engine: Literal["hf", "vllm", "sglang"] = Field(default="hf", description="What generates; hf is built in.")
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
    vllm: VllmConfig = Field(default=VllmConfig(), description="Settings of the engine vllm.")
    sglang: SglangConfig = Field(default=SglangConfig(), description="Settings of the engine sglang.")

    @model_validator(mode="after")
    def _vllm_fits(self) -> Self:
        if self.engine == "vllm":
            mistakes = vllm_mistakes(self)
            if mistakes:
                raise ValueError("; ".join(mistakes))
        return self


def vllm_mistakes(config: RolloutConfig) -> list[str]:
    """What the section vllm and the rest of the rollout section say against each other."""
    vllm, mistakes = config.vllm, []
    if config.device not in ("auto", "cpu", "cuda"):
        mistakes.append(f"device {config.device}: the engine vllm takes its cards from CUDA_VISIBLE_DEVICES, say cuda")
    if vllm.enable_sleep_mode and config.device == "cpu":
        mistakes.append("vllm.enable_sleep_mode: there is no card whose memory could be given back on a CPU")
    if vllm.enable_sleep_mode and vllm.cpu_offload_gib > 0:
        mistakes.append("vllm.enable_sleep_mode does not go together with vllm.cpu_offload_gib")
    budget = vllm.max_num_batched_tokens
    if budget is not None and budget < config.max_num_seqs:
        mistakes.append(f"vllm.max_num_batched_tokens {budget} is below max_num_seqs {config.max_num_seqs}")
    if not vllm.enable_chunked_prefill and budget is not None and budget < (config.max_model_len or 0):
        mistakes.append(
            f"vllm.max_num_batched_tokens {budget} is below max_model_len {config.max_model_len}:"
            " a prompt of that length could not be prefilled without vllm.enable_chunked_prefill"
        )
    return mistakes
