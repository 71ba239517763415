"""What the training loops of a bench share, so that both do the same work under the same clock: tokens and timing."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from services.bench.bare.job import Answer, Job

FIRST_WORD = 3
"""Token ids below it are pad, eos and unknown."""
PROFILE_ROWS = 30
GIB = 2**30


def token_ids(job: Job, *, vocab_size: int) -> npt.NDArray[np.int32]:
    """Random words of every sample of a step, over all ranks: [ranks * micro_batches, prompt + response]."""
    shape = (job["ranks"] * job["micro_batches"], job["prompt_tokens"] + job["response_tokens"])
    return np.random.default_rng(0).integers(FIRST_WORD, vocab_size, size=shape, dtype=np.int32)


def clocked(step: Callable[[], float], job: Job, *, device: torch.device) -> Answer:
    """Seconds and loss of each step after the warm-up, peak memory in GiB, and one more step's kernels if asked for.

    RuntimeError where fewer ranks have met than were asked for: each would train for itself.
    """
    met = dist.get_world_size() if dist.is_initialized() else 1
    if met != job["ranks"]:
        raise RuntimeError(f"{met} of {job['ranks']} ranks train together")
    for _ in range(job["warm_steps"]):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, losses = [], []
    for _ in range(job["steps"]):
        settle(device)
        began = time.perf_counter()
        losses.append(step())
        settle(device)
        seconds.append(time.perf_counter() - began)
    answer: Answer = {"step_seconds": seconds, "losses": losses, "torch": torch.__version__}
    if device.type == "cuda":
        answer["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
    if job["profile"]:
        answer["profile"] = profiled(step, device=device)
    return answer


def settle(device: torch.device) -> None:
    """Every rank has come here, and its GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.all_reduce(torch.zeros((), device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def profiled(step: Callable[[], float], *, device: torch.device) -> str:
    """A table of the longest kernels of one step (on a CPU: operators), and the share of its time that they fill."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=activities):  # the first one takes long to begin
        settle(device)
    began = time.perf_counter()
    with profile(activities=activities) as found:
        step()
        settle(device)
    wall = time.perf_counter() - began
    events = found.key_averages()
    sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    busy = 1e-6 * sum(getattr(event, sort_by) for event in events)
    table = events.table(sort_by=sort_by, row_limit=PROFILE_ROWS, max_name_column_width=100)
    return f"one step: {wall:.3f} s with the profiler, {busy:.3f} s in what is listed\n{table}"
