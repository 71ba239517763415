"""A bounded queue of items in front of killable workers; every item that is admitted gets exactly one outcome.

Items travel in chunks that take about CHUNK_SECONDS: many items of fast functions (few messages), single items of slow
ones (none waits behind another while a worker idles). When a worker dies, its current item fails and the rest of its
chunk goes back to the head of the queue; a fresh worker takes its place.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from reward.config import RewardConfig
from reward.function import Outcome, RewardError, ScoreItem
from reward.load import read_source
from reward.process import WorkerProcess

logger = logging.getLogger(__name__)

MAX_CHUNK_ITEMS = 64
MAX_CHUNK_CHARACTERS = 2**20
CHUNK_SECONDS = 0.02
MAX_BACKOFF_SECONDS = 5.0


class _Batch:
    """The items of one call of `score` and what has come of them. `finished` becomes None, or why there is no more."""

    def __init__(self, size: int) -> None:
        self.outcomes: list[Outcome | None] = [None] * size
        self.finished: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._missing = size

    def settle(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self._missing -= 1
        if self._missing == 0:
            self.finish(None)

    def finish(self, fault: str | None) -> None:
        if not self.finished.done():
            self.finished.set_result(fault)


@dataclass(frozen=True, slots=True)
class _Ticket:
    """One waiting item."""

    batch: _Batch
    index: int
    item: ScoreItem

    def settle(self, outcome: Outcome) -> None:
        self.batch.settle(self.index, outcome)


class Pool:
    """`start`, then `score` from any number of tasks of one event loop, then `close`, which leaves no process."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._settings: dict[str, Any] = {}
        self._waiting: deque[_Ticket] = deque()
        self._batches: set[_Batch] = set()
        self._changed = asyncio.Event()
        self._workers: dict[int, WorkerProcess] = {}
        self._slots: list[asyncio.Task[None]] = []
        self._fault: str | None = "the reward pool is not started"
        self._item_seconds = CHUNK_SECONDS
        self.num_restarts = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live now."""
        return [worker.pid for worker in self._workers.values() if worker.alive]

    @property
    def fault(self) -> str | None:
        """Why the pool takes no items (not started, closed, workers do not start); None while it does."""
        return self._fault

    @property
    def num_waiting(self) -> int:
        """Items admitted and not yet with a worker: at most `max_pending`, and what dead workers handed back."""
        return len(self._waiting)

    async def start(self) -> list[Any]:
        """Start the workers; the first one runs the self-tests. Returns its descriptions of the loaded functions.

        Raises RewardError if a function cannot be loaded or fails a sample of its self-test.
        """
        self._settings = _settings(self._config)
        self._workers[0], described = await self._launch(self_test=True)
        self._fault = None
        self._slots = [
            asyncio.create_task(self._serve(slot), name=f"reward worker {slot}")
            for slot in range(self._config.num_workers)
        ]
        for task in self._slots:
            task.add_done_callback(self._slot_ended)
        return described

    async def score(self, items: Sequence[ScoreItem]) -> list[Outcome]:
        """One outcome per item, in order; waits for room in the queue. Raises RewardError if there are no workers."""
        if not items:
            return []
        batch = _Batch(len(items))
        self._batches.add(batch)
        try:
            await self._admit([_Ticket(batch, index, item) for index, item in enumerate(items)])
            fault = await batch.finished
        finally:
            batch.finished.cancel()  # what a cancelled call left in the queue is passed over
            self._batches.discard(batch)
        if fault is not None:
            raise RewardError(fault)
        return cast(list[Outcome], batch.outcomes)

    async def close(self) -> None:
        """Refuse what waits, kill every worker and wait until all are gone. May be called twice."""
        self._break("the reward pool is closed")
        for task in self._slots:
            task.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers.values()))
        self._workers.clear()

    async def _admit(self, tickets: Sequence[_Ticket]) -> None:
        admitted = 0
        while admitted < len(tickets):
            if self._fault is not None:
                raise RewardError(self._fault)
            room = self._config.max_pending - len(self._waiting)
            if room > 0:
                self._waiting.extend(tickets[admitted : admitted + room])
                admitted += room
                self._wake()
            else:
                await self._changed.wait()

    async def _serve(self, slot: int) -> None:
        """The life of one slot: a worker, chunk after chunk, and its successor when it dies."""
        unlucky = 0  # workers in a row that died without having finished an item
        while True:
            worker = self._workers.get(slot) or await self._replace(slot)
            chunk = await self._take_chunk()
            rest = await self._score_chunk(worker, chunk)
            if worker.alive:
                continue
            self._waiting.extendleft(reversed(rest))
            self._wake()
            await self._bury(slot)
            unlucky = 0 if worker.num_finished else unlucky + 1
            await asyncio.sleep(self._backoff_seconds(unlucky))

    async def _take_chunk(self) -> list[_Ticket]:
        chunk: list[_Ticket] = []
        while not chunk:
            while not self._waiting:
                await self._changed.wait()
            share = -(-len(self._waiting) // self._config.num_workers)
            most = max(1, min(share, MAX_CHUNK_ITEMS, int(CHUNK_SECONDS / self._item_seconds)))
            characters = 0
            while self._waiting and len(chunk) < most and characters < MAX_CHUNK_CHARACTERS:
                ticket = self._waiting.popleft()
                if not ticket.batch.finished.done():
                    chunk.append(ticket)
                    characters += len(ticket.item.prompt) + len(ticket.item.response)
            self._wake()
        return chunk

    async def _score_chunk(self, worker: WorkerProcess, chunk: list[_Ticket]) -> list[_Ticket]:
        """Score a chunk; returns the tickets that got no outcome because the worker died before their turn."""
        if not worker.alive:
            return chunk  # it died idle: none of these items is to blame
        clock = asyncio.get_running_loop().time
        started = clock()
        done = await worker.score([ticket.item for ticket in chunk], lambda i, outcome: chunk[i].settle(outcome))
        if worker.alive:
            self._item_seconds += 0.3 * ((clock() - started) / done - self._item_seconds)
        return chunk[done:]

    async def _replace(self, slot: int) -> WorkerProcess:
        for attempt in range(self._config.max_restarts + 1):
            try:
                self._workers[slot], _ = await self._launch(self_test=False)
                return self._workers[slot]
            except RewardError as error:
                reason = str(error)
                logger.warning("reward worker did not start", extra={"attempt": attempt + 1, "reason": reason})
                await asyncio.sleep(self._backoff_seconds(attempt + 1))
        raise RewardError(f"reward worker did not start {self._config.max_restarts + 1} times in a row: {reason}")

    async def _launch(self, *, self_test: bool) -> tuple[WorkerProcess, list[Any]]:
        return await WorkerProcess.start(
            {**self._settings, "self_test": self_test},
            timeout_seconds=self._config.timeout_seconds,
            start_timeout_seconds=self._config.start_timeout_seconds,
        )

    async def _bury(self, slot: int) -> None:
        await self._workers[slot].kill()
        del self._workers[slot]
        self.num_restarts += 1

    def _backoff_seconds(self, times: int) -> float:
        seconds = self._config.restart_backoff_seconds * 2 ** min(times - 1, 32) if times else 0.0
        return min(seconds, MAX_BACKOFF_SECONDS)

    def _wake(self) -> None:
        """Let everybody who waits for room or for items look again."""
        self._changed.set()
        self._changed.clear()

    def _slot_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("reward pool broke", extra={"reason": str(error)})
            self._break(str(error))

    def _break(self, fault: str) -> None:
        self._fault = fault
        for batch in self._batches:
            batch.finish(fault)
        self._wake()


def _settings(config: RewardConfig) -> dict[str, Any]:
    functions = []
    for function in config.functions:
        source = read_source(function.target)
        functions.append(
            {
                "target": function.target,
                "name": function.label,
                "weight": function.weight,
                "parameters": function.parameters,
                "source": None if source is None else source.decode("latin-1"),
            }
        )
    return {"functions": functions, "reward_clip": config.reward_clip, "memory_limit_mb": config.memory_limit_mb}
