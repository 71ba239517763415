"""This process as a rank of the trainer, with the model that it trains."""

import torch
from torch import nn
from torch._C._distributed_c10d import Store

from trainer.adapters.lora import attach_adapter
from trainer.config import TrainerConfig
from trainer.model.load import bound_memory, load_model, pick_device, prepare_process
from trainer.parallel import Ranks
from trainer.parallel.start import own_device, seat, start


def load_trained(config: TrainerConfig, *, store: Store | None = None) -> tuple[nn.Module, Ranks, torch.device]:
    """The start model, whole and on its device, with an adapter where LoRA is asked for; and the ranks that share it.

    store: where the ranks meet; None: as torchrun says. ValueError or OSError where there is no such model.
    """
    place = seat()
    device = own_device(config, place)
    prepare_process(threads=config.threads, seed=config.seed)
    bound_memory(device, fraction=config.memory_fraction)
    ranks = start(place, config, device=pick_device(device), store=store)
    model = load_model(config.model, dtype=config.dtype, attn_implementation=config.attn_implementation, device=device)
    if config.lora is not None:
        attach_adapter(model, config.lora, base_model=config.model)
    return model, ranks, pick_device(device)
