"""Liger's Triton kernels for a model's norms, rotary embedding and gated MLP, where they are installed.

Its fused cross-entropy is not used: trainer/model/fused_logprobs.py stands in its place.
"""

from torch import nn

PARTS = {"rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False}


def use_liger(model: nn.Module) -> None:
    """Puts the kernels into `model`. They patch transformers' class for the whole process.

    Raises ValueError where the package or a GPU is missing, or it does not know the architecture.
    """
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ValueError("trainer.liger needs Liger's kernels: pip install 'offbeat[liger]'") from error
    if next(model.parameters()).device.type != "cuda":
        raise ValueError("trainer.liger: Triton kernels run on GPUs only, and the trainer's device is a CPU")
    kind = getattr(model.config, "model_type", "")
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise ValueError(f"trainer.liger: no kernels for {kind!r}; there are some for {known}")
    _apply_liger_kernel_to_instance(model=model, **PARTS)
