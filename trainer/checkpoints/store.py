"""The checkpoints of one run: written aside, published by a rename, pruned."""

import contextlib
import os
import re
import shutil
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread

from safetensors import SafetensorError

from trainer import durable
from trainer.checkpoints.exchange import Exchange
from trainer.checkpoints.failure import CheckpointFailed
from trainer.checkpoints.fill import fill, fill_together
from trainer.checkpoints.search import LATEST, newest_whole, steps_in
from trainer.checkpoints.snapshot import Snapshot
from trainer.config import CheckpointConfig
from trainer.parallel import ALONE, Ranks

FORMAT = 1
LATE_SECONDS = 5.0
"""That a rank may end its write after rank 0 has ended its own."""
_LEFTOVER = re.compile(r".+\.tmp-[A-Za-z0-9-]+")


class CheckpointStore:
    """Every rank has one; rank 0 is the one that publishes. One write at a time, on another thread than training."""

    def __init__(self, folder: Path, config: CheckpointConfig, *, incarnation: int, ranks: Ranks = ALONE) -> None:
        """Makes the folder and removes what an earlier life left half-written; raises CheckpointFailed on OSError."""
        self._folder = folder
        self._config = config
        self._ranks = ranks
        self._suffix = f".tmp-{incarnation}"
        self._under_way: Future[Path] | None = None
        if ranks.leads:
            _clear(folder)
        self._exchange = Exchange(ranks, deadline_seconds=config.deadline_seconds) if ranks.size > 1 else None

    def ready(self) -> None:
        """Before a snapshot, on the thread that trains, on all ranks: the write before is over.

        CheckpointFailed, on all ranks, where it is not.
        """
        if self._exchange is None:
            self.finish(self._config.deadline_seconds)
        else:
            self.finish(min(LATE_SECONDS, self._config.deadline_seconds))
            self._exchange.renew(busy=self._under_way is not None)

    def begin(self, taken: Snapshot) -> Future[Path]:
        """`write` on a thread of its own."""
        self._under_way = Future()
        Thread(target=self._write_into, args=(self._under_way, taken), name=f"save-{taken.step}", daemon=True).start()
        return self._under_way

    def finish(self, seconds: float = LATE_SECONDS) -> None:
        """Wait for the write under way, at most so long, whatever it comes to."""
        if self._under_way is not None and wait([self._under_way], timeout=seconds).done:
            self._under_way = None

    def _write_into(self, result: Future[Path], taken: Snapshot) -> None:
        result.set_running_or_notify_cancel()
        try:
            result.set_result(self.write(taken))
        except Exception as error:
            result.set_exception(error)

    def write(self, taken: Snapshot) -> Path:
        """Writes `step_N` and moves `latest` to it, then prunes; replaces a `step_N` that is there.

        Raises CheckpointFailed (disk full, no permission, folder gone, a rank that does not answer) with nothing
        half-written left behind.
        """
        target = self._folder / f"step_{taken.step}"
        fresh = target.with_name(target.name + self._suffix)
        try:
            if self._ranks.leads:
                _remove(fresh)
            self._fill(fresh, taken)
            if self._ranks.leads:
                self._publish(fresh, target)
                self._prune(newest=taken.step)
        except (OSError, RuntimeError, SafetensorError, CheckpointFailed) as error:
            if self._ranks.leads:
                self._discard(target)
            raise CheckpointFailed(f"checkpoint {target} was not written: {error}") from error
        return target

    def _fill(self, fresh: Path, taken: Snapshot) -> None:
        measured = {}
        if self._exchange is None:
            fill(fresh, taken)
        else:
            try:
                measured = fill_together(fresh, taken, self._exchange)
            except RuntimeError:
                self._exchange.fail()
                raise
        if self._ranks.leads:
            durable.seal(fresh, {"format": FORMAT, "step": taken.step}, measured_before=measured)

    def _publish(self, fresh: Path, target: Path) -> None:
        aside = self._aside(target)
        if os.path.lexists(target):
            _remove(aside)
            os.rename(target, aside)
        os.rename(fresh, target)
        durable.sync(self._folder)
        durable.replace_text(self._folder / LATEST, target.name, suffix=self._suffix)
        _remove(aside)

    def _aside(self, target: Path) -> Path:
        return target.with_name(f"{target.name}-old{self._suffix}")

    def _discard(self, target: Path) -> None:
        """After a failed write: puts back what stood at `target` and removes what was half-written."""
        aside = self._aside(target)
        with contextlib.suppress(OSError):
            if not os.path.lexists(target) and os.path.lexists(aside):
                os.rename(aside, target)
        with contextlib.suppress(OSError):
            (self._folder / f"{LATEST}{self._suffix}").unlink(missing_ok=True)
        for folder in (aside, target.with_name(target.name + self._suffix)):
            shutil.rmtree(folder, ignore_errors=True)

    def latest_verified(self) -> tuple[Path | None, list[str]]:
        """The newest whole checkpoint and what was wrong with newer ones; on several ranks all call it together."""
        return newest_whole(self._folder, self._ranks if self._exchange is None else self._exchange.ranks)

    def oldest(self) -> int:
        """Step of the oldest checkpoint that is kept; 0 where there is none."""
        return min(steps_in(self._folder), default=0)

    def _prune(self, *, newest: int) -> None:
        """Removes what the config does not keep of the steps before `newest`, which was just written."""
        past = [step for step in steps_in(self._folder) if step < newest]
        every = self._config.keep_every
        for step in past[: max(0, len(past) - self._config.keep_last + 1)]:
            if not (every and step % every == 0):
                shutil.rmtree(self._folder / f"step_{step}", ignore_errors=True)


def _clear(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for entry in os.listdir(folder):
            if _LEFTOVER.fullmatch(entry):
                _remove(folder / entry)
    except OSError as error:
        raise CheckpointFailed(f"cannot use the checkpoint folder {folder}: {error}") from error


def _remove(path: Path) -> None:
    """Removes a file, a link (not what it points to) or a folder; nothing when it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
