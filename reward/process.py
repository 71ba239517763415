"""One worker process as its parent sees it: start it, hand it a chunk, kill it when an item takes too long.

Written on the event loop's own process protocol: answers are read in the callback that brings their bytes, so that
an item costs the parent microseconds and its deadline one clock reading.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from reward.frames import FrameBuffer, encode
from reward.function import FAILURE_KINDS, Failure, Outcome, RewardError, Score, ScoreItem

# After a deadline the loop gets this time to read what arrived while it was busy itself.
GRACE_SECONDS = 0.01
# Answers that come within this time are read together: a third less work for the parent with fast functions.
GATHER_SECONDS = 0.001
STDIN, STDOUT = 0, 1


@dataclass(slots=True, kw_only=True)
class _Run:
    """A chunk at work: `current` is the first unanswered item, `since` when it became that (loop time)."""

    size: int
    deliver: Callable[[int, Outcome], None]
    finished: asyncio.Future[None]
    since: float
    current: int = 0
    overdue: int | None = None


class WorkerProcess(asyncio.SubprocessProtocol):
    """A started worker. One chunk at a time; after `alive` has become False it is of no further use."""

    def __init__(self, *, timeout_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_seconds = timeout_seconds
        self._frames = FrameBuffer()
        self._ready: asyncio.Future[list[Any]] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._stage = "starting"
        self._run: _Run | None = None
        self._verdict: Failure | None = None
        self._closing = False
        self.num_finished = 0
        self._transport: asyncio.SubprocessTransport | None = None
        self._watch: asyncio.TimerHandle | None = None

    @classmethod
    async def start(
        cls, settings: dict[str, Any], *, timeout_seconds: float, start_timeout_seconds: float
    ) -> tuple["WorkerProcess", list[Any]]:
        """A worker that has loaded its functions, and what it says of them. Raises RewardError if it does not start."""
        loop = asyncio.get_running_loop()
        command = (sys.executable, "-P", "-m", "reward.worker")
        try:
            _, worker = await loop.subprocess_exec(
                lambda: cls(timeout_seconds=timeout_seconds),
                *command,
                stderr=None,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise RewardError(f"cannot start a worker process: {error.strerror}") from error
        try:
            worker._send(settings)
            async with asyncio.timeout(start_timeout_seconds):
                return worker, await worker._ready
        except TimeoutError:
            await worker.kill()
            raise RewardError(f"worker not ready after {start_timeout_seconds:g} s, while {worker._stage}") from None
        except RuntimeError as error:  # uvloop: the pipe is closed already
            await worker.kill()
            raise RewardError(f"worker was gone at once: {error}") from error
        except BaseException:
            await worker.kill()
            raise

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group."""
        assert self._transport is not None
        return self._transport.get_pid()

    @property
    def alive(self) -> bool:
        """Whether it can take a chunk."""
        return self._verdict is None and not self._closing

    async def score(self, items: Sequence[ScoreItem], deliver: Callable[[int, Outcome], None]) -> int:
        """Score a chunk, giving each outcome to `deliver(index, outcome)` as it comes. Returns how many were given.

        If the worker dies or is killed at its deadline, the current item gets the Failure and later ones get nothing.
        """
        try:
            self._send([[i.prompt, i.response, i.ground_truth, i.data_source, dict(i.extra)] for i in items])
        except RuntimeError:  # uvloop: the pipe is closed already, and pipe_connection_lost is still to come
            self._closing = True
            return 0
        run = _Run(size=len(items), deliver=deliver, finished=self._loop.create_future(), since=self._loop.time())
        self._run = run
        self._watch = self._loop.call_later(self._timeout_seconds, self._check_deadline, run)
        try:
            await run.finished
        finally:
            if self._watch is not None:
                self._watch.cancel()
            self._run = None
        return run.current

    async def kill(self) -> None:
        """Kill the worker and all that it started, and wait until it is gone."""
        self._kill(Failure("crash", "worker was stopped"))
        await asyncio.shield(self._gone)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process runs."""
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Bytes from the worker: messages of its start, or answers."""
        if self._verdict is not None:
            return
        try:
            for message in self._frames.feed(data):
                self._take(message)
        except (ValueError, TypeError, KeyError):
            self._kill(Failure("crash", "worker wrote what is no answer"))
        if self._run is not None and not self._run.finished.done():
            self._gather()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """The worker is dead or about to be."""
        self._closing = True

    def process_exited(self) -> None:
        """The worker is dead; children of a reward function may hold its pipes open, and go with it."""
        self._closing = True
        self._kill_group()

    def connection_lost(self, exc: Exception | None) -> None:
        """The worker is dead and all that it wrote has been read."""
        self._gone.set_result(None)
        verdict = self._verdict or Failure("crash", f"worker {self._ending()}")
        if not self._ready.done():
            self._ready.set_exception(RewardError(f"{verdict.message} while {self._stage}"))
            self._ready.exception()  # seen, even if nobody waits for it any more
        if self._run is not None and not self._run.finished.done():
            self._settle(self._run, verdict)
            if not self._run.finished.done():
                self._run.finished.set_result(None)
        if self._transport is not None:
            self._transport.close()

    # Below: private, in the order in which it is called.

    def _send(self, message: object) -> None:
        assert self._transport is not None
        pipe = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(STDIN))
        pipe.write(encode(message))

    def _take(self, message: Any) -> None:
        if isinstance(message, list):
            outcome = _outcome(*message)
            if self._run is None or self._run.finished.done():
                raise ValueError("an answer that nobody asked for")
            self._settle(self._run, outcome)
            self.num_finished += 1
        elif "stage" in message:
            self._stage = str(message["stage"])
        elif not self._ready.done():
            if "refused" in message:
                self._ready.set_exception(RewardError(message["refused"]))
            else:
                self._ready.set_result(list(message["ready"]))

    def _settle(self, run: _Run, outcome: Outcome) -> None:
        run.deliver(run.current, outcome)
        run.current += 1
        run.since = self._loop.time()
        if run.current == run.size:
            run.finished.set_result(None)

    def _check_deadline(self, run: _Run) -> None:
        if run is not self._run or run.finished.done():
            return
        wait = run.since + self._timeout_seconds - self._loop.time()
        if wait <= 0 and run.overdue == run.current:
            self._kill(Failure("timeout", f"no value after {self._timeout_seconds:g} s"))
            return
        if wait <= 0:
            # If this loop itself was held up, the answer may lie unread in the pipe: let it read once more.
            run.overdue = run.current
            wait = GRACE_SECONDS
        self._watch = self._loop.call_later(wait, self._check_deadline, run)

    def _gather(self) -> None:
        assert self._transport is not None
        pipe = cast(asyncio.ReadTransport, self._transport.get_pipe_transport(STDOUT))
        pipe.pause_reading()
        self._loop.call_later(GATHER_SECONDS, _read_on, pipe)

    def _kill(self, verdict: Failure) -> None:
        if self._verdict is None:
            self._verdict = verdict
        self._kill_group()

    def _kill_group(self) -> None:
        if not self._gone.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _ending(self) -> str:
        code = self._transport.get_returncode() if self._transport is not None else None
        if code is None or code >= 0:
            return f"exited with code {code}"
        names = {int(known): known.name for known in signal.Signals}
        return f"was killed by {names.get(-code, 'signal')} ({-code})"


def _read_on(pipe: asyncio.ReadTransport) -> None:
    if not pipe.is_closing():
        pipe.resume_reading()


def _outcome(first: Any, second: Any, answer: Any = None) -> Outcome:
    if isinstance(first, str):
        if first not in FAILURE_KINDS:
            raise ValueError(f"no failure kind: {first}")
        return Failure(first, str(second))
    if not isinstance(first, float) or not isinstance(second, dict) or not isinstance(answer, str | None):
        raise TypeError("an answer is [number, parts, text or null] or [kind, message]")
    return Score(first, second, answer)


def _environment() -> dict[str, str]:
    # -P keeps the working folder off the path; the folder of this package must be on it also without an install.
    own = str(Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{own}{os.pathsep}{inherited}" if inherited else own}
