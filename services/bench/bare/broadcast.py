"""One flat buffer between two processes by torch's own broadcast: what the wire gives. Rank 0 sends."""

from __future__ import annotations

import time
from datetime import timedelta

from services.bench.bare.job import Answer, Job, answering

WARM_UP = 3
MEET_SECONDS = 120.0


def work(job: Job) -> Answer:
    """Milliseconds of each broadcast at this rank, from a barrier to the last byte. kind: nccl or gloo."""
    import torch
    import torch.distributed as dist

    kind = job["kind"]
    device = torch.device("cuda", 0) if kind == "nccl" else torch.device("cpu")
    place = f"tcp://127.0.0.1:{job['port']}"
    timeout = timedelta(seconds=MEET_SECONDS)
    dist.init_process_group(
        kind,
        init_method=place,
        rank=job["rank"],
        world_size=2,
        timeout=timeout,
        device_id=device if kind == "nccl" else None,
    )
    buffer = torch.zeros(job["num_bytes"], dtype=torch.uint8, device=device)
    buffer += job["rank"] == 0
    times = []
    for _ in range(WARM_UP + job["rounds"]):
        dist.barrier()
        settle(device)
        began = time.perf_counter()
        dist.broadcast(buffer, 0)
        settle(device)
        times.append(1e3 * (time.perf_counter() - began))
    arrived = bool((buffer == 1).all())
    dist.destroy_process_group()
    return {"ms": times[WARM_UP:], "arrived": arrived, "torch": torch.__version__}


def settle(device: object) -> None:
    """Wait for the GPU, where there is one."""
    import torch

    if getattr(device, "type", "") == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    answering(work)
