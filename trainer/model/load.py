"""Loading the model that is trained, its fingerprint, and the process around it."""

import hashlib
import random
import re
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoModelForCausalLM

from trainer.attention.packed import check_packable

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
CONFIG_FILES = ("config.json", "generation_config.json")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = CONFIG_FILES + TOKENIZER_FILES


def load_model(path: str, *, dtype: str, attn_implementation: str, device: str) -> nn.Module:
    """The causal language model in the folder `path`, on its device, without dropout.

    Weights come from safetensors only and code from the installed transformers only. Raises ValueError when the folder
    has no config.json or the model cannot be packed, OSError when transformers finds no weights.
    """
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        model_folder(path),
        dtype=getattr(torch, dtype),
        attn_implementation=attn_implementation,
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
    )
    check_packable(model)
    without_dropout(model)
    return model.to(pick_device(device))


def model_folder(path: str) -> Path:
    """The folder of a model: `path` itself, or the local copy of a Hugging Face id (fetched when it is missing).

    Only safetensors, configs and tokenizer files are fetched. Raises ValueError when `path` is neither.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or not HUB_ID.fullmatch(path):
        raise ValueError(f"{path!r} is no model: a folder with a config.json, or a Hugging Face id (owner/name)")
    return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.safetensors.index.json", *_SMALL_FILES]))


def without_dropout(model: nn.Module) -> None:
    """Sets every dropout of `model` to 0: the trained policy must be the one that sampled."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def pick_device(device: str) -> torch.device:
    """ "auto" is the present CUDA device, or the CPU where there is none. A CUDA device always has its index."""
    chosen = torch.device(device) if device != "auto" else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", torch.cuda.current_device()) if str(chosen) == "cuda" else chosen


def bound_memory(device: str, *, fraction: float | None) -> None:
    """Bounds what torch may take of a CUDA device's memory; more is an OutOfMemoryError. None: no bound."""
    chosen = pick_device(device)
    if fraction is not None and chosen.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(fraction, chosen)


def prepare_process(*, threads: int, seed: int) -> None:
    """Sets torch's CPU threads (0: unchanged) and the seeds of torch, numpy and python."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def model_files(path: str | Path) -> list[Path]:
    """The config and tokenizer files that lie in a model folder, by name."""
    return [Path(path) / name for name in sorted(_SMALL_FILES) if (Path(path) / name).is_file()]


def model_fingerprint(path: str | Path) -> str:
    """sha256 over names and contents of config.json and the tokenizer files; equal where rooms speak of one model."""
    digest = hashlib.sha256()
    for file in model_files(path):
        if file.name != "generation_config.json":
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
