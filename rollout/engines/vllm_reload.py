"""New weights for a model that vLLM has prepared for running: when a plain copy is enough, and what else is done."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}


def copies_plainly(model: torch.nn.Module, device: torch.device) -> bool:
    """Whether the model's weights lie in memory as they were loaded: dense, not quantized, on a GPU.

    A CPU packs linear weights, quantization and mixtures of experts lay them out anew, and multi-head latent attention
    multiplies some of them in advance.
    """
    if device.type != "cuda":
        return False
    methods = {type(method).__name__ for one in model.modules() if (method := getattr(one, "quant_method", None))}
    return methods <= PLAIN_METHODS and not any("MLA" in type(one).__name__ for one in model.modules())


class Reload:
    """vLLM's layer by layer reload: each layer is loaded as from a checkpoint, prepared, and copied to its place."""

    def __init__(self, model: torch.nn.Module, model_config: object) -> None:
        self._model, self._model_config = model, model_config

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole layers; `finish` must follow."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        # It warns of each layer that got no weight: a tied lm_head, rotary tables. That all came was checked before.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        initialize_layerwise_reload(self._model)
        self._model.load_weights(iter(tensors))  # type: ignore[operator]

    def finish(self) -> None:
        """Prepare what is left, and what vLLM leaves out."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._model_config)
        pack_again(self._model)


def pack_again(model: torch.nn.Module) -> None:
    """On a CPU a tied lm_head has packed the embedding's old weight and would go on with it."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(module, "cpu_linear") and module.weight.numel() > 0:  # type: ignore[operator]
            method.process_weights_after_loading(module)
