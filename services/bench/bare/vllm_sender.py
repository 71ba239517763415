"""The trainer's end of vLLM's own weight transfer: rank 0, sends the model of a run again and again."""

from __future__ import annotations

from services.bench.bare.job import Answer, Job, answering
from services.bench.bare.vllm_receiver import WARM_UP
from services.bench.bare.work import config_of


def work(job: Job) -> Answer:
    """Send as often as the other end asks; each waits until the other end receives."""
    import torch
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from trainer.model.load import load_model

    trainer = config_of(job).trainer
    model = load_model(trainer.model, dtype=trainer.dtype, attn_implementation="sdpa", device="cuda:0")
    group = NCCLWeightTransferEngine.trainer_init(
        {"master_address": "127.0.0.1", "master_port": job["port"], "world_size": 2}
    )
    for _ in range(WARM_UP + job["rounds"]):
        NCCLWeightTransferEngine.trainer_send_weights(
            ((name, parameter.detach()) for name, parameter in model.named_parameters()),
            {"group": group, "packed": True},
        )
        torch.cuda.synchronize()
    return {"torch": torch.__version__}


if __name__ == "__main__":
    answering(work)
