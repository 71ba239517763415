"""The writer thread of the ledger: rows are queued by the loop and committed together, at most milliseconds later.

A commit costs about the same for one sample and for a thousand: rows are let gather for a moment unless somebody waits.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

GATHER_SECONDS = 0.02
Row = tuple[Any, ...]
Segment = dict[str, list[Row]]


def connect(path: Path, synchronous: str) -> sqlite3.Connection:
    """A connection in WAL mode, outside of transactions unless one is begun."""
    connection = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    return connection


class Committer:
    """Owns the writing connection. Statements of one transaction run in `order`, whatever order they were queued in."""

    def __init__(self, path: Path, *, synchronous: str, order: Mapping[str, int]) -> None:
        self.problem: Exception | None = None
        self._order = order
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._hurry = threading.Event()
        self._segments: list[Segment] = [{}]
        self._waiting: list[Future[None]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(path, synchronous), name="ledger", daemon=True)
        self._thread.start()

    def add(self, statement: str, *rows: Row) -> None:
        """Queue rows for a statement; sqlite3.ProgrammingError once the ledger is closed."""
        with self._lock:
            self._check_open()
            self._segments[-1].setdefault(statement, []).extend(rows)
        if not self._work.is_set():
            self._work.set()

    def barrier(self) -> None:
        """What is queued later is written later, whatever the order says."""
        with self._lock:
            self._segments.append({})

    async def durable(self) -> None:
        """Wait until everything queued so far is committed; raises what the database said."""
        future: Future[None] = Future()
        with self._lock:
            self._check_open()
            self._waiting.append(future)
        self._hurry.set()
        self._work.set()
        await asyncio.wrap_future(future)

    def close(self) -> None:
        """Commit what is queued and stop; safe to call twice."""
        with self._lock:
            self._closing = True
        self._hurry.set()
        self._work.set()
        self._thread.join(timeout=30.0)

    def _check_open(self) -> None:
        if self._closing:
            raise sqlite3.ProgrammingError("the ledger is closed")

    def _run(self, path: Path, synchronous: str) -> None:
        connection = connect(path, synchronous)
        closing = False
        while not closing:
            self._work.wait()
            self._hurry.wait(GATHER_SECONDS)
            self._work.clear()
            self._hurry.clear()
            with self._lock:
                closing = self._closing
                segments, self._segments = self._segments, [{}]
                waiting, self._waiting = self._waiting, []
            self._commit(connection, segments, waiting)
        connection.close()

    def _commit(self, connection: sqlite3.Connection, segments: list[Segment], waiting: list[Future[None]]) -> None:
        if self.problem is None:  # after a lost transaction nothing may be written that builds on it
            try:
                self._write(connection, segments)
            except Exception as error:  # a full disk, say: whoever waits for durability must hear it
                self.problem = error
        for future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if self.problem is not None:
                future.set_exception(self.problem)
            else:
                future.set_result(None)

    def _write(self, connection: sqlite3.Connection, segments: list[Segment]) -> None:
        connection.execute("BEGIN")
        try:
            for segment in segments:
                for statement in sorted(segment, key=self._order.__getitem__):
                    connection.executemany(statement, segment[statement])
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
