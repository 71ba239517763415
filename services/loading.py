"""Services that share a card load one after the other: an engine measures what is free, which may not change then."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TextIO

LOCK_FILE = "loading.lock"
POLL_SECONDS = 0.1


@asynccontextmanager
async def alone_on_card(folder: Path, *, shared: bool) -> AsyncIterator[None]:
    """Inside, no other process of this run loads; a process that dies lets go. At once where no card is shared."""
    if not shared:
        yield
        return
    with lock_file(folder) as file:
        while not taken(file.fileno()):
            await asyncio.sleep(POLL_SECONDS)
        try:
            yield
        finally:  # an engine's processes may have inherited the file
            fcntl.flock(file, fcntl.LOCK_UN)


def lock_file(folder: Path) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / LOCK_FILE).open("w")


def taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
