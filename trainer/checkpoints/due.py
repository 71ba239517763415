"""When a checkpoint is due."""

import time
from collections.abc import Callable

from trainer.config import CheckpointConfig


class Due:
    """By steps, by time, or by both: whichever comes first."""

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self.saved()

    def after(self, step: int) -> bool:
        """Whether one is due, now that `step` has been trained."""
        every, minutes = self._config.every_steps, self._config.every_minutes
        by_time = minutes > 0 and self._clock() - self._saved_at >= minutes * 60
        return by_time or (every > 0 and step % every == 0)

    def saved(self) -> None:
        """One begins now."""
        self._saved_at = self._clock()
