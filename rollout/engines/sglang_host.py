"""SGLang's own engine, on a thread with an event loop of its own.

    server's loop --submit, abort--> host's loop: SGLang's TokenizerManager <--zmq--> scheduler processes
    server's loop --command (any thread, one at a time)----------------------rpc----> scheduler processes

Why a thread: in the main one SGLang takes SIGTERM and SIGQUIT for itself and ends the whole process on either. Why one
that lives as long as the engine: SGLang's processes ask the kernel to be killed with the thread that started them.
"""

import asyncio
import atexit
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import wait
from typing import Any

from rollout.engines.sglang_commands import METHOD, Reply, Word, unpack_reply
from rollout.engines.sglang_samples import ABORTED, Output

logger = logging.getLogger(__name__)
POLL_MILLISECONDS = 200
JOIN_SECONDS = 30.0


class Host:
    """Owns SGLang's processes."""

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self.opened: Future[None] = Future()
        self._arguments = dict(arguments)
        self._lost: Callable[[str], None] = logger.error
        self._gone = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="offbeat-sglang", daemon=True)
        self._rpc = threading.Lock()
        self._engine: Any = None
        self._strangers: set[int | None] = set()
        self._children: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent: set[str] = set()

    # Life.

    def open(self, *, lost: Callable[[str], None]) -> None:
        """Start the processes; `opened` says when they are ready, or why not.

        `lost` is called once, from whatever thread, when they cannot go on.
        """
        self._lost = lost
        self._thread.start()

    def max_input_len(self) -> int:
        """The longest prompt plus one that the KV cache and the settings allow."""
        return int(self._engine.tokenizer_manager.max_req_input_len)

    def close(self) -> None:
        """End the processes and the thread. Blocks."""
        self._gone.set()
        self._end_children()
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._launch())
        except BaseException as error:  # SGLang also raises SystemExit; told to whoever waits for `opened`
            self._end_children()
            self.opened.set_exception(RuntimeError(f"SGLang has not started: {type(error).__name__}: {error}"))
            return
        self.opened.set_result(None)
        self._loop.run_forever()
        self._drop_tasks()

    async def _launch(self) -> None:
        """Blocks the host's loop for a minute or so; inside it, so that SGLang takes this loop for its own."""
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.managers import tokenizer_manager

        from rollout.engines.sglang_worker import run_scheduler_process

        class PushEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler_process)

        self._strangers = {child.pid for child in multiprocessing.active_children()}
        # SGLang's own would kill this process, and all its children with it, where its receiving loop fails.
        tokenizer_manager.print_exception_wrapper = self._guard
        self._engine = PushEngine(**self._arguments)
        atexit.unregister(self._engine.shutdown)  # it kills every child of this process, SGLang's or not
        atexit.register(self._end_children)
        self._watch()

    def _watch(self) -> None:
        """Instead of SGLang's watchdog, which sends this process a SIGQUIT."""
        self._engine.tokenizer_manager._subprocess_watchdog.stop()
        self._children = self._started()
        threading.Thread(target=self._wait_for_end, name="offbeat-sglang-watch", daemon=True).start()

    def _wait_for_end(self) -> None:
        wait([child.sentinel for child in self._children])
        dead = [child for child in self._children if not child.is_alive()]
        self.give_up("; ".join(f"process {child.pid} of SGLang ended with {child.exitcode}" for child in dead))

    def _started(self) -> list[Any]:
        """The processes that were not there before SGLang."""
        return [child for child in multiprocessing.active_children() if child.pid not in self._strangers]

    async def _guard(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await function()
        except Exception as error:  # SGLang's loops have nobody else to tell
            logger.exception("SGLang's receiving loop has failed")
            self.give_up(f"{type(error).__name__}: {error}")

    def give_up(self, reason: str) -> None:
        """Say once, from any thread, that nothing more will come; silent after `close`."""
        if not self._gone.is_set():
            self._gone.set()
            self._lost(reason)

    def _end_children(self) -> None:
        """Only SGLang's own processes, and what they have started."""
        children, self._children = self._children or self._started(), []
        if not children:
            return
        from sglang.srt.utils import kill_process_tree

        for child in children:
            kill_process_tree(child.pid)
        for child in children:
            child.join(JOIN_SECONDS)

    def _drop_tasks(self) -> None:
        """What still waits for SGLang waits for nothing."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    # Samples.

    def submit(self, samples: Sequence[Mapping[str, Any]], deliver: Callable[[str, Output], None]) -> None:
        """Generate each (fields of SGLang's GenerateReqInput); `deliver(rid, output)` is called on the host's loop."""
        self._loop.call_soon_threadsafe(self._begin, list(samples), deliver)

    def abort(self, rids: Sequence[str]) -> None:
        """Each comes out of `deliver` soon, as aborted."""
        self._loop.call_soon_threadsafe(self._abort, list(rids))

    def _begin(self, samples: Sequence[Mapping[str, Any]], deliver: Callable[[str, Output], None]) -> None:
        for sample in samples:
            self._unsent.add(sample["rid"])
            task = self._loop.create_task(self._generate(sample, deliver))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _abort(self, rids: Sequence[str]) -> None:
        for rid in rids:
            if rid in self._unsent:
                self._unsent.discard(rid)
            else:
                self._engine.tokenizer_manager.abort_request(rid)

    async def _generate(self, sample: Mapping[str, Any], deliver: Callable[[str, Output], None]) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        rid, output = sample["rid"], ABORTED
        if rid in self._unsent:
            self._unsent.discard(rid)
            try:
                async for answer in self._engine.tokenizer_manager.generate_request(GenerateReqInput(**sample), None):
                    output = answer
            except Exception as error:  # one bad sample is one bad sample
                logger.warning("SGLang has refused a sample", extra={"facts": {"rid": rid, "error": str(error)}})
        deliver(rid, output)

    # Commands.

    def command(self, word: Word, *, seconds: float, **parameters: bool | int | float | str) -> Reply:
        """Run it in every scheduler process between two batches. Blocks; RuntimeError if they do not answer."""
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send

        with self._rpc:
            self._raise_if_gone()
            socket = self._engine.send_to_rpc
            sock_send(socket, RpcReqInput(method=METHOD, parameters={"word": word, **parameters}))
            deadline = time.monotonic() + seconds
            while not socket.poll(POLL_MILLISECONDS):
                self._raise_if_gone()
                if time.monotonic() > deadline:  # a later answer would be taken for that of the next command
                    self.give_up(f"SGLang has not answered {word} in {seconds:.0f} seconds")
            return unpack_reply(sock_recv(socket).message)

    def _raise_if_gone(self) -> None:
        if self._gone.is_set():
            raise RuntimeError("SGLang is not running")
