"""How the ranks agree on a checkpoint while they train: by a gloo group of its own, with a deadline of its own."""

import threading
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from trainer.checkpoints.failure import CheckpointFailed
from trainer.parallel import Ranks


class Exchange:
    """Every rank makes one at the same time, on the thread that trains, and renews it there before each checkpoint."""

    def __init__(self, ranks: Ranks, *, deadline_seconds: float) -> None:
        self._training = ranks
        self._deadline = timedelta(seconds=deadline_seconds)
        self._failed = threading.Event()
        self.group = self._new_group()

    @property
    def ranks(self) -> Ranks:
        """The trainer's ranks, for exchanges about checkpoints."""
        return replace(self._training, group=self.group)

    def fail(self) -> None:
        """An exchange was not answered in time: what is left of it would mix with the next one."""
        self._failed.set()

    def renew(self, *, busy: bool) -> None:
        """Ready for the next checkpoint; CheckpointFailed, on all ranks, where one is still busy with the last."""
        told = self._training.gather([busy, self._failed.is_set()])
        late = [rank for rank, (is_busy, _) in enumerate(told) if is_busy]
        if late:
            raise CheckpointFailed(f"ranks {late} still write the checkpoint before")
        if any(failed for _, failed in told):
            dist.destroy_process_group(self.group)
            self.group = self._new_group()
            self._failed.clear()

    def _new_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._deadline)
        return group
