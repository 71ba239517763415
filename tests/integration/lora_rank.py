"""One rank of a learner with an adapter, started by torchrun; told by one JSON argument. Rank 0 writes its pushes."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.integration.learner_rank import trajectories
from trainer.adapters.lora import attach_adapter
from trainer.adapters.push import outgoing_of
from trainer.config import AlgorithmConfig, TrainerConfig
from trainer.configs.lora import LoraConfig
from trainer.configs.parallel import ParallelConfig
from trainer.configs.update import OptimizerConfig
from trainer.model.load import load_model
from trainer.parallel.start import seat, start
from trainer.step import Learner


def main() -> None:
    spec = json.loads(sys.argv[1])
    folder = Path(spec["folder"])
    torch.set_num_threads(1)
    lora = LoraConfig(rank=4, alpha=64)
    config = TrainerConfig(
        model=spec["model"],
        device="cpu",
        dtype=spec["dtype"],
        max_tokens_per_microbatch=32,
        gradient_checkpointing=True,
        parallel=ParallelConfig(deadline_seconds=60),
        algorithm=AlgorithmConfig(minibatches=2, kl_use="loss", kl_coef=0.1),
        optimizer=OptimizerConfig(lr=1e-3),
        lora=lora,
    )
    ranks = start(seat(), config, device=torch.device("cpu"))
    model = load_model(config.model, dtype=config.dtype, attn_implementation="sdpa", device="cpu")
    learner = Learner(attach_adapter(model, lora), config, ranks)
    told = [learner.train(trajectories(step, samples=8), step=step, policy_version=step) for step in range(2)]
    merged = outgoing_of(learner.model, lora, bucket_bytes=4000, dtype=None, streamed=False)
    factors = lora.model_copy(update={"push": "adapter"})
    adapter = outgoing_of(learner.model, factors, bucket_bytes=4000, dtype=None, streamed=False)
    merged.pack()
    adapter.pack()
    if ranks.leads:
        (folder / "metrics.json").write_text(json.dumps(told))
        save_file(merged.named_views(), folder / "weights.safetensors")
        save_file(adapter.named_views(), folder / "adapter.safetensors")
        (folder / "bases.json").write_text(json.dumps([one.base_checksum for one in adapter.manifest.low_rank]))
    if ranks.size > 1:
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
