"""One compute thread: runs commands between two steps, steps while there is work, sleeps otherwise.

event loop --ask--> inbox --> [commands, step, commands, step, ...] --deliver--> event loop
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class ComputeThread(Generic[Result]):
    """Owns a loop of steps. `deliver` and `fail` are called on the compute thread."""

    def __init__(
        self,
        *,
        step: Callable[[], list[Result]],
        busy: Callable[[], bool],
        deliver: Callable[[list[Result]], None],
        fail: Callable[[Exception], None],
        threads: int | None,
    ) -> None:
        self._step, self._busy, self._deliver, self._fail = step, busy, deliver, fail
        self._threads = threads
        self._inbox: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._wake = threading.Condition()
        self._paused = self._closing = self._ended = False
        self._thread = threading.Thread(target=self._run, name="offbeat-generate", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, command: Callable[[], None]) -> "Future[None]":
        """Run a command before the next step and say how it went.

        A ValueError goes to the asker only; any other exception also ends the thread.
        """
        future: Future[None] = Future()
        with self._wake:
            if self._ended or self._closing:
                future.set_exception(RuntimeError("the engine is not running"))
            else:
                self._inbox.append((command, future))
                self._wake.notify()
        return future

    def pause(self) -> None:
        """Called by a command."""
        self._paused = True

    def resume(self) -> None:
        """Called by a command."""
        self._paused = False

    def close(self) -> None:
        """End after the step under way and wait for it. Blocks."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            while self._work_once():
                pass
        except Exception as error:
            self._fail(error)
        finally:
            with self._wake:
                self._ended = True
            self._refuse_commands()

    def _work_once(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._closing or (self._busy() and not self._paused))
        if self._closing:
            return False
        self._run_commands()
        if self._busy() and not self._paused and (done := self._step()):
            self._deliver(done)
        return True

    def _run_commands(self) -> None:
        while self._inbox:
            command, future = self._inbox.popleft()
            try:
                command()
            except ValueError as error:
                future.set_exception(error)
            except Exception as error:
                future.set_exception(error)
                raise
            else:
                future.set_result(None)

    def _refuse_commands(self) -> None:
        while self._inbox:
            _, future = self._inbox.popleft()
            future.set_exception(RuntimeError("the engine has stopped"))
