"""A loaded model made ready for training, as the config says: kernels, recomputation, compilation, shards."""

from torch import nn

from trainer.config import TrainerConfig
from trainer.model.layers import compile_layers, recompute_layers
from trainer.model.liger import use_liger
from trainer.parallel import Ranks
from trainer.parallel.sharding import shard


def make_ready(trained: nn.Module, model: nn.Module, config: TrainerConfig, ranks: Ranks, *, offload: bool) -> None:
    """`trained` is what runs and is sharded, `model` the one of transformers in it. offload: shards in host memory."""
    if config.liger:
        use_liger(model)
    trained.train(config.gradient_checkpointing)
    if config.gradient_checkpointing:
        recompute_layers(model, share=config.recomputed_share)
    if config.compile:
        compile_layers(model)
    if ranks.mesh is not None:
        shard(trained, ranks.mesh, config.parallel, offload=offload)
