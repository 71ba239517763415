"""Our commands as a scheduler process of SGLang runs them, between two batches. Only the swap stops decoding: the bytes
of a push move on a thread of the receiver."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from rollout.engine import TransferFailed
from rollout.engines.install import Installer
from rollout.engines.sglang_commands import Reply, unpack_checksums, unpack_request
from rollout.start_weights import StartWeights
from rollout.weights import Receiver, verify

logger = logging.getLogger(__name__)


class Push:
    """The receiver and the installer of one rank. `scheduler` is SGLang's; commands come between two of its batches."""

    def __init__(self, scheduler: Any) -> None:
        self.version = 0
        self._scheduler = scheduler
        self._receiver: Receiver | None = None
        self._installer: Installer | None = None
        self._dropping: threading.Thread | None = None
        self._paused = self._asleep = False
        self._commands: dict[str, Callable[..., Reply]] = {
            "open": self._open,
            "poll": self._poll,
            "swap": self._swap,
            "drop": self._drop,
            "pause": self._pause,
            "resume": self._resume,
            "sleep": self._sleep,
            "wake": self._wake,
        }

    def answer(self, parameters: dict[str, Any]) -> Reply:
        """Run one command. Never raises: an exception here would end SGLang's process."""
        given = dict(parameters)
        try:
            # Staging memory is written by another thread, which is not in SGLang's inference mode.
            with torch.inference_mode(False), torch.no_grad():
                return self._commands[given.pop("word")](**given)
        except TransferFailed as error:
            return Reply("corrupt" if error.corrupt else "failed", str(error))
        except Exception as error:  # told to whoever asked, in the other process
            logger.exception("offbeat: a command failed")
            return Reply("failed", f"{type(error).__name__}: {error}")

    def _open(self, request: str) -> Reply:
        if self._receiver is None:
            model = self._scheduler.tp_worker.model_runner.model
            device = torch.device("cuda", torch.cuda.current_device())
            self._receiver = Receiver(device, start=StartWeights(self._scheduler.server_args.model_path, device))
            self._installer = Installer(model, model.load_weights)
        if self._dropping is not None:  # its memory is wanted again
            self._dropping.join()
        self._receiver.open(unpack_request(request), rank_offset=self._scheduler.ps.tp_rank)
        return Reply("done")

    def _poll(self, checksums: str) -> Reply:
        if self._receiver is None:
            raise TransferFailed("no push is open")
        found = self._receiver.poll()
        if found is None:
            return Reply("pending")
        verify(found, unpack_checksums(checksums))
        return Reply("done")

    def _drop(self) -> Reply:
        """On a thread: it waits a little for a collective that hangs."""
        if self._receiver is not None:
            self._dropping = threading.Thread(target=self._receiver.drop, name="offbeat-drop", daemon=True)
            self._dropping.start()
        return Reply("done")

    def _swap(self, version: int, mode: str, salt: str) -> Reply:
        """The batch under way ends with the old weights; the next one is launched with the new ones."""
        assert self._receiver is not None and self._installer is not None
        torch.cuda.synchronize()
        began = time.perf_counter()
        if mode == "recompute":
            self._retract()
        self._installer.install(self._receiver.tensors())
        torch.cuda.synchronize()
        self._receiver.taken()
        self.version = version
        for request in self._scheduler.waiting_queue:  # a prefix that the old weights computed is not theirs any more
            request.extra_key = salt
        return Reply("done", f"{time.perf_counter() - began:.6f}")

    def _retract(self) -> None:
        """Put the running samples back into the queue, without their KV cache and with their tokens."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._go_on()

    def _go_on(self) -> None:
        """Unless the user has paused, or there is no memory to go on with."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if not (self._paused or self._asleep):
            self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def _pause(self) -> Reply:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
        self._paused = True
        return Reply("done")

    def _resume(self) -> Reply:
        self._paused = False
        self._go_on()
        return Reply("done")

    def _sleep(self) -> Reply:
        """SGLang asserts that nothing is unfinished, and that would end its process: so its queue is put aside."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput, ReleaseMemoryOccupationReqInput

        scheduler = self._scheduler
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
        self._asleep = scheduler.is_fully_idle()
        try:
            if self._asleep:
                scheduler.weight_updater.release_memory_occupation(ReleaseMemoryOccupationReqInput())
        finally:
            scheduler.waiting_queue = waiting
            self._go_on()
        return Reply("done") if self._asleep else Reply("failed", "a batch is under way that cannot be taken back")

    def _wake(self) -> Reply:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self._scheduler.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput())
        self._asleep = False
        self._go_on()
        return Reply("done")
