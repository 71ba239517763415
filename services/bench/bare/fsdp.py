"""Training by torch and transformers alone, as one writes it by hand: FSDP2, checkpointed layers, SDPA, fused AdamW.

One sequence is one micro-batch; gradients are summed over ranks in float32, once a step.
options: "compile" (torch.compile of every layer), "cudnn" (attention by cuDNN).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from services.bench.bare.clock import clocked, token_ids
from services.bench.bare.job import Answer, Job, answering

LEARNING_RATE = 1e-6
MAX_GRAD_NORM = 1.0


def work(job: Job) -> Answer:
    """Seconds of each step at this rank."""
    device = meet(job)
    model = build(job, device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    ids_BT = torch.from_numpy(token_ids(job, vocab_size=model.config.vocab_size)).to(device, torch.int64)
    mine_BT = ids_BT[dist.get_rank() :: dist.get_world_size()]
    with attention(job):
        answer = clocked(lambda: step(model, optimizer, mine_BT, job["response_tokens"]), job, device=device)
    dist.destroy_process_group()
    return {"num_parameters": num_parameters, **answer}


def meet(job: Job) -> torch.device:
    """This rank's device, once it has joined the others; one rank needs no torchrun."""
    alone: dict[str, Any] = {}
    if job["ranks"] == 1:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **alone)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **alone)
    return device


def build(job: Job, device: torch.device) -> Any:
    """The model, sharded layer by layer; embedding and head are one tensor and belong to the root."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation="sdpa").to(device)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,))
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if size > 1 else None)
    for layer in model.model.layers:
        if "compile" in job["options"]:
            layer.forward = torch.compile(layer.forward)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def attention(job: Job) -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if "cudnn" in job["options"] else nullcontext()


def step(model: Any, optimizer: torch.optim.Optimizer, ids_BT: Tensor, response_tokens: int) -> float:
    """One update on all sequences of this rank; the mean loss over those of all ranks."""
    total = torch.zeros((), device=ids_BT.device)
    for at, ids_T in enumerate(ids_BT):
        model.set_requires_gradient_sync(at + 1 == len(ids_BT))
        kept = model(ids_T[None], use_cache=False, logits_to_keep=response_tokens + 1).logits[0, :-1]
        loss = cross_entropy(kept.float(), ids_T[-response_tokens:]) / len(ids_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


if __name__ == "__main__":
    answering(work)
