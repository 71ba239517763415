"""vLLM's own weight transfer, packed, over NCCL, into an idle engine: start, update, finish, timed from outside.

Written for vLLM 0.26, where `packed` belongs to the update; from 0.28 on it belongs to the group.
"""

from __future__ import annotations

import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from services.bench.bare.job import Answer, Job, answering
from services.bench.bare.vllm import engine_settings
from services.bench.bare.work import config_of

if TYPE_CHECKING:
    from services.config import Config

WARM_UP = 2


def work(job: Job) -> Answer:
    """Milliseconds of each transfer and of its three calls."""
    config = config_of(job)
    settings = engine_settings(config)
    from vllm import LLM, __version__
    from vllm.config import WeightTransferConfig

    llm = LLM(**settings, weight_transfer_config=WeightTransferConfig(backend="nccl"))
    begin, update = requests(config, job["port"])
    llm.init_weight_transfer_engine(begin)
    parts: list[dict[str, float]] = []
    for _ in range(WARM_UP + job["rounds"]):
        marks = [time.perf_counter()]
        for call in (llm.start_weight_update, lambda: llm.update_weights(update), llm.finish_weight_update):
            call()
            marks.append(time.perf_counter())
        names = ("start", "update", "finish")
        parts.append({name: 1e3 * (marks[at + 1] - marks[at]) for at, name in enumerate(names)})
    del parts[:WARM_UP]
    return {"ms": [sum(part.values()) for part in parts], "parts_ms": parts, "version": __version__}


def requests(config: Config, port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What opens the group and what announces the weights."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo

    from rollout.engines.vllm_model import read_facts

    begin: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    shapes = read_facts(config.trainer.model).shapes
    update: dict[str, Any] = {
        "names": list(shapes),
        "dtype_names": [config.trainer.dtype] * len(shapes),
        "shapes": [list(shape) for shape in shapes.values()],
    }
    packed_at = begin if "packed" in {field.name for field in fields(NCCLWeightTransferInitInfo)} else update
    packed_at["packed"] = True
    return {"init_info": begin}, {"update_info": update}


if __name__ == "__main__":
    answering(work)
