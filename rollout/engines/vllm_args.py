"""Our settings as vLLM's: environment variables before it is imported, then the arguments of its engine."""

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from rollout.config import RolloutConfig, VllmConfig
from rollout.engines.arguments import wrong_arguments as wrong

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

BACKEND = "offbeat"
WORKER = "rollout.engines.vllm_worker.PushWorker"
OWN_FIELDS = {
    "model": "model",
    "dtype": "dtype",
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
    "cpu_offload_gb": "vllm.cpu_offload_gib",
    **{name: f"vllm.{name}" for name in VllmConfig.model_fields if name != "engine_args"},
}
TAKEN = ("weight_transfer_config", "worker_extension_cls", "logprobs_mode", "disable_log_stats", "skip_tokenizer_init")


def set_environment(config: RolloutConfig) -> None:
    """To be called before vLLM is imported. What the user has set stays, but for what exact spans need."""
    for name, value in environment(config).items():
        os.environ.setdefault(name, value)
    # A step's tokens are counted as a whole or not at all: nothing may run between its chunks.
    os.environ["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] = str(1 << 30)


def environment(config: RolloutConfig) -> dict[str, str]:
    """What vLLM reads from the environment, as we want it."""
    variables = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # FlashInfer's sampler gives no logprobs of the sampled distribution and would be compiled at start.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # This process has gRPC's threads: a fork would copy their locks.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_KVCACHE_SPACE": str(config.vllm.cpu_kv_cache_gib),
    }
    if config.threads is not None:
        variables |= {"OMP_NUM_THREADS": str(config.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return variables


def engine_args(model: str, config: RolloutConfig, *, own_dtype: str) -> "AsyncEngineArgs":
    """Imports vLLM. own_dtype: of the checkpoint.

    ValueError for an engine argument that vLLM does not have or that is not the user's.
    """
    import dataclasses

    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    mistakes = wrong_arguments(config.vllm.engine_args, known)
    if mistakes:
        raise ValueError("; ".join(mistakes))
    return AsyncEngineArgs(
        model=model,
        **arguments(config, own_dtype=own_dtype),
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=WORKER,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )


def arguments(config: RolloutConfig, *, own_dtype: str) -> dict[str, object]:
    """Our fields under vLLM's names, and the user's own."""
    vllm = config.vllm
    given: dict[str, object] = {
        # By itself vLLM would take float32 down to 16 bits.
        "dtype": own_dtype if config.dtype == "auto" else config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "data_parallel_size": vllm.data_parallel_size,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "max_num_batched_tokens": vllm.max_num_batched_tokens,
        "enable_chunked_prefill": vllm.enable_chunked_prefill,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enforce_eager": vllm.enforce_eager,
        "enable_sleep_mode": vllm.enable_sleep_mode,
        "cpu_offload_gb": vllm.cpu_offload_gib,
        # Two servers with one seed would draw the same noise.
        "seed": int.from_bytes(os.urandom(4)) >> 1,
    }
    if vllm.enable_lora:
        given |= {"enable_lora": True, "max_lora_rank": vllm.max_lora_rank}
    return given | dict(vllm.engine_args)


def wrong_arguments(given: Mapping[str, object], known: Collection[str]) -> list[str]:
    """One sentence for each argument that cannot be passed on."""
    refused = dict.fromkeys(TAKEN, "is set by the engine itself")
    return wrong(given, known, section="vllm", engine="vLLM", own_fields=OWN_FIELDS, refused=refused)
