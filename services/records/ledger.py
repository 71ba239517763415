"""The ledger on disk: every sample's state, leases, batches and payloads, in SQLite in the run folder.

Each change of the book is queued here as rows; services/records/commit.py writes them. Reading happens at a start, at a
rewind and by whoever looks at a run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import protos
from services.records.book import Batch, Group, Key, Sample, State
from services.records.commit import Committer, connect

SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (position INTEGER PRIMARY KEY, prompt BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS samples (id INTEGER PRIMARY KEY, state INTEGER NOT NULL, attempts INTEGER NOT NULL,
    server TEXT, oldest_version INTEGER, reward REAL, breakdown TEXT, route TEXT, step INTEGER, reason TEXT);
CREATE TABLE IF NOT EXISTS trajectories (id INTEGER PRIMARY KEY, trajectory BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS reference_logprobs (id INTEGER PRIMARY KEY, logprobs BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (step INTEGER PRIMARY KEY, samples BLOB NOT NULL, trained INTEGER NOT NULL);
"""
INSERT_GROUP = "INSERT INTO groups VALUES (?, ?)"
INSERT_SAMPLE = "INSERT INTO samples (id, state, attempts) VALUES (?, 0, 0)"
INSERT_TRAJECTORY = "INSERT OR REPLACE INTO trajectories VALUES (?, ?)"
SET_GENERATED = (
    f"UPDATE samples SET state = {State.GENERATED:d}, attempts = ?, server = ?, oldest_version = ? WHERE id = ?"
)
SET_SCORED = f"UPDATE samples SET state = {State.SCORED:d}, reward = ?, breakdown = ?, route = ? WHERE id = ?"
INSERT_REFERENCE = "INSERT OR REPLACE INTO reference_logprobs VALUES (?, ?)"
SET_ENDED = "UPDATE samples SET state = ?, attempts = ?, reason = ? WHERE id = ?"
SET_BATCHED = f"UPDATE samples SET state = {State.BATCHED:d}, step = ? WHERE id = ?"
INSERT_BATCH = "INSERT INTO batches VALUES (?, ?, 0)"
SET_TRAINED = "UPDATE batches SET trained = 1 WHERE step = ?"
SET_REWOUND = "UPDATE batches SET trained = 0 WHERE step > ?"
SET_FACT = "INSERT OR REPLACE INTO facts VALUES (?, ?)"
PRUNE = "DELETE FROM {table} WHERE id IN (SELECT id FROM samples WHERE step IS NOT NULL AND step < ?)"
PRUNE_TRAJECTORIES = PRUNE.format(table="trajectories")
PRUNE_REFERENCES = PRUNE.format(table="reference_logprobs")
# The order of a sample's life. Statements of one transaction run in this order, whatever order they were queued in, so
# that a row queued late in its life is never overwritten by an earlier stage.
ORDER = {
    statement: rank
    for rank, statement in enumerate(
        (INSERT_GROUP, INSERT_SAMPLE, INSERT_TRAJECTORY, SET_GENERATED, SET_SCORED, INSERT_REFERENCE, SET_ENDED)
        + (SET_REWOUND, INSERT_BATCH, SET_BATCHED, SET_TRAINED, SET_FACT, PRUNE_TRAJECTORIES, PRUNE_REFERENCES)
    )
}
INDEX_BITS = 16


def row_id(key: Key) -> int:
    return key[0] << INDEX_BITS | key[1]


def key_of(identifier: int) -> Key:
    return identifier >> INDEX_BITS, identifier & (1 << INDEX_BITS) - 1


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A sample as the ledger has it."""

    key: Key
    state: State
    attempts: int
    reason: str
    trajectory: protos.Trajectory | None


class Ledger:
    """Writes through one thread, reads through the caller's; a Journal of services/records/book.py."""

    def __init__(self, path: Path, *, synchronous: str = "NORMAL") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._reader = connect(path, synchronous)
        self._reader.executescript(SCHEMA)
        self._committer = Committer(path, synchronous=synchronous, order=ORDER)
        self._add = self._committer.add

    @property
    def problem(self) -> Exception | None:
        """What the database said when a commit failed."""
        return self._committer.problem

    async def durable(self) -> None:
        """Wait until everything queued so far is committed."""
        await self._committer.durable()

    def close(self) -> None:
        """Commit what is queued and stop."""
        self._committer.close()
        self._reader.close()

    # Journal.

    def accepted(self, group: Group) -> None:
        self._add(INSERT_GROUP, (group.position, group.prompt.SerializeToString()))
        self._add(INSERT_SAMPLE, *((row_id(sample.key),) for sample in group.samples))

    def generated(self, sample: Sample) -> None:
        assert sample.trajectory is not None
        identifier = row_id(sample.key)
        self._add(INSERT_TRAJECTORY, (identifier, sample.trajectory.SerializeToString()))
        self._add(SET_GENERATED, (sample.attempts, sample.server, sample.oldest_version, identifier))

    def scored(self, sample: Sample) -> None:
        trajectory = sample.trajectory
        assert trajectory is not None
        breakdown = json.dumps(dict(trajectory.reward_breakdown))
        self._add(SET_SCORED, (trajectory.reward, breakdown, trajectory.reward_route, row_id(sample.key)))

    def referenced(self, sample: Sample) -> None:
        assert sample.trajectory is not None
        logprobs = sample.trajectory.reference_logprobs.SerializeToString()
        self._add(INSERT_REFERENCE, (row_id(sample.key), logprobs))

    def ended(self, sample: Sample, reason: str) -> None:
        self._add(SET_ENDED, (int(sample.state), sample.attempts, reason, row_id(sample.key)))

    def batched(self, batch: Batch) -> None:
        identifiers = np.array([row_id(key) for key in batch.keys], dtype="<i8")
        self._add(INSERT_BATCH, (batch.step, identifiers.tobytes()))
        self._add(SET_BATCHED, *((batch.step, identifier) for identifier in identifiers.tolist()))

    def trained(self, step: int) -> None:
        self._add(SET_TRAINED, (step,))

    def pushed(self, version: int) -> None:
        self.set_fact("pushed_version", str(version))

    def rewound(self, step: int) -> None:
        self._committer.barrier()  # what was trained before the rewind must not be written after it
        self._add(SET_REWOUND, (step,))

    # Facts: single values, e.g. run_id and incarnation.

    def set_fact(self, name: str, value: str) -> None:
        self._add(SET_FACT, (name, value))

    def fact(self, name: str, default: str = "") -> str:
        row = self._reader.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return default if row is None else str(row[0])

    # Reading: at start, at a rewind, and for whoever looks at a run.

    def groups(self) -> Iterator[tuple[int, protos.Prompt, list[StoredSample]]]:
        """The groups that hold samples outside batches, with those samples, in order; ended ones included."""
        open_rows = self._reader.execute(
            "SELECT DISTINCT id >> ? FROM samples WHERE state < ? ORDER BY 1", (INDEX_BITS, State.BATCHED)
        ).fetchall()
        for (position,) in open_rows:
            prompt = self._reader.execute("SELECT prompt FROM groups WHERE position = ?", (position,)).fetchone()[0]
            low, high = position << INDEX_BITS, position + 1 << INDEX_BITS
            rows = self._reader.execute(
                "SELECT id, state, attempts, reason FROM samples WHERE id >= ? AND id < ? ORDER BY id", (low, high)
            )
            yield position, protos.Prompt.FromString(prompt), [self._sample(*row) for row in rows.fetchall()]

    def batches(self, *, after: int, trained: bool | None = None) -> list[Batch]:
        """The recorded batches of later steps, in order, with their trajectories."""
        rows = self._reader.execute("SELECT step, samples, trained FROM batches WHERE step > ? ORDER BY step", (after,))
        return [self._batch(step, blob) for step, blob, done in rows.fetchall() if trained in (None, bool(done))]

    def totals(self) -> dict[str, Counter[str]]:
        """Ended samples by state name and reason, `samples` trained and accepted, `next_group`."""
        found: dict[str, Counter[str]] = {name: Counter() for name in ("quarantined", "dropped", "trained", "accepted")}
        rows = self._reader.execute(
            "SELECT state, reason, COUNT(*) FROM samples WHERE state IN (?, ?) GROUP BY state, reason",
            (State.QUARANTINED, State.DROPPED),
        )
        for state, reason, count in rows.fetchall():
            found[State(state).name.lower()][reason] += count
        trained = self._reader.execute("SELECT SUM(LENGTH(samples) / 8) FROM batches WHERE trained = 1").fetchone()[0]
        accepted = self._reader.execute("SELECT COUNT(*), COALESCE((MAX(id) >> ?) + 1, 0) FROM samples", (INDEX_BITS,))
        found["trained"]["samples"] = trained or 0
        found["accepted"]["samples"], found["accepted"]["next_group"] = accepted.fetchone()
        return found

    def steps(self) -> tuple[int, int]:
        """(last recorded step, last trained step)."""
        row = self._reader.execute("SELECT COALESCE(MAX(step), 0) FROM batches").fetchone()
        done = self._reader.execute("SELECT COALESCE(MAX(step), 0) FROM batches WHERE trained = 1").fetchone()
        return int(row[0]), int(done[0])

    def staleness(self) -> Counter[int]:
        """Trained samples by staleness."""
        rows = self._reader.execute(
            "SELECT b.step - 1 - s.oldest_version, COUNT(*) FROM samples s JOIN batches b ON s.step = b.step"
            " WHERE b.trained = 1 GROUP BY 1"
        )
        return Counter(dict(rows.fetchall()))

    def prune(self, *, before_step: int) -> None:
        """Forget the payloads of the steps before `before_step`; the rows of the samples stay."""
        self._add(PRUNE_TRAJECTORIES, (before_step,))
        self._add(PRUNE_REFERENCES, (before_step,))

    def _sample(self, identifier: int, state: int, attempts: int, reason: str | None) -> StoredSample:
        return StoredSample(key_of(identifier), State(state), attempts, reason or "", self.trajectory(identifier))

    def trajectory(self, identifier: int) -> protos.Trajectory | None:
        """A stored trajectory with its reward and reference logprobs; None where there is none (any more)."""
        row = self._reader.execute(
            "SELECT t.trajectory, s.reward, s.breakdown, s.route, r.logprobs FROM trajectories t"
            " JOIN samples s ON s.id = t.id LEFT JOIN reference_logprobs r ON r.id = t.id WHERE t.id = ?",
            (identifier,),
        ).fetchone()
        if row is None:
            return None
        blob, reward, breakdown, route, logprobs = row
        trajectory = protos.Trajectory.FromString(blob)
        if reward is not None:
            trajectory.reward, trajectory.reward_route = reward, route
            trajectory.reward_breakdown.update(json.loads(breakdown))
        if logprobs is not None:
            trajectory.reference_logprobs.ParseFromString(logprobs)
        return trajectory

    def _batch(self, step: int, blob: bytes) -> Batch:
        identifiers: list[int] = np.frombuffer(blob, dtype="<i8").tolist()
        stored = [self.trajectory(identifier) for identifier in identifiers]
        trajectories = [trajectory for trajectory in stored if trajectory is not None]
        batch = Batch(step, [key_of(identifier) for identifier in identifiers], trajectories)
        for trajectory in trajectories:
            batch.staleness[step - 1 - min(span.policy_version for span in trajectory.spans)] += 1
        return batch
