"""Our settings as SGLang's: environment variables before it is imported, then the arguments of its engine."""

import os
from collections.abc import Collection, Mapping

from rollout.config import RolloutConfig
from rollout.engines.arguments import wrong_arguments as wrong

MARGIN = 6
"""SGLang keeps so many positions of its context_length to itself and would cut a sample that needs them."""
OWN_FIELDS = {
    "model_path": "model",
    "dtype": "dtype",
    "device": "device",
    "base_gpu_id": "device",
    "max_running_requests": "max_num_seqs",
    "context_length": "max_model_len",
    "tp_size": "sglang.tensor_parallel_size",
    "cuda_graph_max_bs_decode": "sglang.cuda_graph_max_bs",
    "enable_deterministic_inference": "sglang.deterministic",
    "skip_tokenizer_init": "sglang.stop_strings",
    "mem_fraction_static": "sglang.mem_fraction_static",
    "attention_backend": "sglang.attention_backend",
    "sampling_backend": "sglang.sampling_backend",
    "disable_cuda_graph": "sglang.disable_cuda_graph",
    "chunked_prefill_size": "sglang.chunked_prefill_size",
    "enable_memory_saver": "sglang.enable_memory_saver",
}
REFUSED = {
    "dp_size": "start one rollout server for each copy of the model",
    "enable_dp_attention": "start one rollout server for each copy of the model",
    "pp_size": "a push reaches tensor-parallel ranks only",
    "nnodes": "a push reaches the ranks of one host only",
    "speculative_algorithm": "a push does not reach a draft model",
    "quantization": "a push brings the weights as they are in training",
    "weight_cache_mode": "shared weights cannot be overwritten",
    "disaggregation_mode": "one server does prefill and decode",
    "tokenizer_worker_num": "requests come from this process alone",
    "custom_sigquit_handler": "the engine has its own",
}
WANTED = {
    "NCCL_CUMEM_ENABLE": "0",  # SGLang's own choice for its processes; said first so that both ends can be compared
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by MARGIN; no position past the model's own is used
}
NEEDED = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}  # logprobs of what was sampled, temperature included


def set_environment() -> None:
    """To be called before SGLang is imported; its processes inherit it. What the user has set of WANTED stays."""
    for name, value in WANTED.items():
        os.environ.setdefault(name, value)
    os.environ.update(NEEDED)


def nccl_environment() -> dict[str, str]:
    """The NCCL variables that SGLang's processes have."""
    return {"NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", WANTED["NCCL_CUMEM_ENABLE"])}


def check_arguments(config: RolloutConfig) -> None:
    """Imports SGLang. ValueError for an argument that this SGLang does not have or that is not the user's."""
    import dataclasses

    from sglang.srt.server_args import ServerArgs

    known = {field.name for field in dataclasses.fields(ServerArgs)}
    mistakes = wrong_arguments(config.sglang.engine_args, known)
    if mistakes:
        raise ValueError("; ".join(mistakes))


def arguments(model: str, config: RolloutConfig, *, max_model_len: int, with_tokenizer: bool) -> dict[str, object]:
    """Our fields under SGLang's names, and the user's own; a None is left to SGLang."""
    sglang = config.sglang
    given: dict[str, object] = {
        "model_path": model,
        "dtype": config.dtype,
        "device": "cuda",
        "base_gpu_id": first_gpu(config.device),
        "max_running_requests": config.max_num_seqs,
        "context_length": max_model_len + MARGIN,
        "tp_size": sglang.tensor_parallel_size,
        "mem_fraction_static": sglang.mem_fraction_static,
        "attention_backend": sglang.attention_backend,
        "sampling_backend": sglang.sampling_backend,
        "disable_cuda_graph": sglang.disable_cuda_graph,
        "cuda_graph_max_bs_decode": sglang.cuda_graph_max_bs,
        "chunked_prefill_size": sglang.chunked_prefill_size,
        "enable_memory_saver": sglang.enable_memory_saver,
        "enable_weights_cpu_backup": sglang.enable_memory_saver,
        "enable_deterministic_inference": sglang.deterministic,
        "skip_tokenizer_init": not with_tokenizer,
        "log_level": "warning",
    }
    return {name: value for name, value in (given | dict(sglang.engine_args)).items() if value is not None}


def first_gpu(device: str) -> int:
    """Index of the first card. ValueError without one."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdigit():
        raise ValueError(f"the engine sglang needs a GPU, and rollout.device is {device}")
    return int(index or "0")


def wrong_arguments(given: Mapping[str, object], known: Collection[str]) -> list[str]:
    """One sentence for each argument that cannot be passed on."""
    refused = {name: f"cannot be set: {why}" for name, why in REFUSED.items()}
    return wrong(given, known, section="sglang", engine="SGLang", own_fields=OWN_FIELDS, refused=refused)
