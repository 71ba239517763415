"""The repeated layers of a transformer: what is recomputed, compiled and sharded one by one."""

import torch
from torch import nn

GRAPHS = 64
"""More than there are kinds of calls of one layer."""


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that transformers says must stay whole, in the model's order."""
    modules = list(model.modules())
    names = {name for module in modules for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in modules if type(module).__name__ in names]


def recompute_layers(model: nn.Module, *, share: float) -> None:
    """Activations of this share of the layers, evenly spread, are computed again in backward instead of kept."""
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    able = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    for at, layer in enumerate(one for one in able if one in set(repeated_layers(model))):
        layer.gradient_checkpointing = int((at + 1) * share) > int(at * share)  # type: ignore[assignment]


def compile_layers(model: nn.Module) -> None:
    """Each layer's forward runs compiled. Hooks around it, of FSDP2 and of recomputation, stay as they are.

    All layers share one code object and its graphs: by shapes, with and without gradients. Where these run out a layer
    runs uncompiled, and what it recomputes in backward no longer fits what its compiled forward has kept.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    for layer in repeated_layers(model):
        layer.forward = torch.compile(layer.forward)
