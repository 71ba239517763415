"""vLLM's plug-in point, called in each of vLLM's processes: our weight transfer is made known; orphans end."""

import multiprocessing
import os
import threading

from rollout.engines.vllm_args import BACKEND

_guarded = threading.Event()


def register() -> None:
    """Called by vLLM through the entry point group vllm.general_plugins and by ourselves; may be repeated."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rollout.engines.vllm_transfer", "PushTransfer")
    if multiprocessing.parent_process() is not None and not _guarded.is_set():
        _guarded.set()
        threading.Thread(target=end_with_parent, name="offbeat-orphan", daemon=True).start()


def end_with_parent() -> None:
    """A killed server leaves vLLM's processes behind, with the card's memory: its successor could not start."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
