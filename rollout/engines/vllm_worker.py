"""What vLLM's workers can be asked over its own calls, between two decode steps. Each worker imports this file."""

import logging

from vllm.config import VllmConfig, set_current_vllm_config

from rollout.engines.vllm_plugin import register
from rollout.engines.vllm_transfer import PushTransfer

logger = logging.getLogger(__name__)
register()  # where no entry points are installed this is the first that vLLM sees of us


class PushWorker:
    """Mixed into vLLM's worker class."""

    vllm_config: VllmConfig
    weight_transfer_engine: PushTransfer

    def offbeat_swap(self) -> str:
        """Take what has arrived as the weights. Returns what went wrong, empty if nothing did."""
        try:
            with set_current_vllm_config(self.vllm_config):
                self.weight_transfer_engine.take()
        except Exception as error:  # told to the engine as text: vLLM would keep the cause in this process's log
            logger.exception("the new weights could not be taken")
            return f"{type(error).__name__}: {error}"
        return ""
