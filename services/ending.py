"""How a run ends: everything is trained and saved, or a guard of the trainer stops it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

import protos
from services.errors import RunStopped
from services.records.journalist import Journalist

logger = logging.getLogger(__name__)
FAREWELL_SECONDS = 10.0


class Ending:
    """Set once, from then on every heartbeat is answered with it."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self.stopped = ""
        """Why a guard has ended the run."""

    def stop(self, report: protos.StepReport, journalist: Journalist) -> None:
        """The trainer goes no further: everybody is let go, and nothing is started again."""
        if not self.finished.is_set():
            self.stopped = f"stopped at step {report.step}: {report.stop_reason}"
            journalist.tell("stopped", "conductor", "a guard ends the run", step=report.step, why=report.stop_reason)
            self.finished.set()

    def check(self) -> None:
        """RunStopped where a guard has ended the run."""
        if self.stopped:
            raise RunStopped(self.stopped)


async def farewell(members: Collection[str]) -> None:
    """Answer heartbeats until everybody has heard that the run is over."""
    try:
        async with asyncio.timeout(FAREWELL_SECONDS):
            while members:
                await asyncio.sleep(0.05)
    except TimeoutError:
        logger.warning("some services did not leave", extra={"facts": {"names": list(members)}})
