"""vLLM's plug-in point: makes our weight transfer known in each of vLLM's processes."""

from rollout.engines.vllm_args import BACKEND


def register() -> None:
    """Called by vLLM through the entry point group vllm.general_plugins and by ourselves; may be repeated."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rollout.engines.vllm_transfer", "PushTransfer")
