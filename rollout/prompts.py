"""An endless stream of prompts that can be entered at any position: what a resumed run needs is one integer."""

import hashlib
from collections.abc import Sequence

from rollout.datasets.row import PromptRow


class PromptStream:
    """Position n holds a row of epoch n // len(rows); every epoch holds every row once.

    With `shuffle` each epoch has an order of its own, which depends on the seed, the epoch and the number of rows
    alone: row i is ranked by the SHA-256 of "seed/epoch/i", the same on every machine and Python version.
    """

    def __init__(self, rows: Sequence[PromptRow], *, seed: int, shuffle: bool) -> None:
        """Raises ValueError when there are no rows or a prompt_id stands twice."""
        if not rows:
            raise ValueError("a stream of prompts needs at least one row")
        self._rows = tuple(rows)
        if len({row.prompt_id for row in self._rows}) != len(self._rows):
            raise ValueError("prompt_ids are not unique: a sample could not be told from another")
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: Sequence[int] = ()

    def __len__(self) -> int:
        """Rows in one epoch."""
        return len(self._rows)

    def at(self, position: int) -> tuple[int, PromptRow]:
        """(epoch, row) at a position from 0 on; cheap while the epoch stays the same. Raises ValueError below 0."""
        if position < 0:
            raise ValueError(f"positions start at 0, not {position}")
        epoch, place = divmod(position, len(self._rows))
        if not self._shuffle:
            return epoch, self._rows[place]
        if epoch != self._epoch:
            self._order, self._epoch = permutation(len(self._rows), seed=self._seed, epoch=epoch), epoch
        return epoch, self._rows[self._order[place]]


def permutation(length: int, *, seed: int, epoch: int) -> list[int]:
    """The order of one epoch: indices 0 to length - 1 sorted by the SHA-256 of "seed/epoch/index"."""
    start = hashlib.sha256(f"{seed}/{epoch}/".encode())

    def rank(index: int) -> bytes:
        digest = start.copy()
        digest.update(str(index).encode())
        return digest.digest()

    return sorted(range(length), key=rank)
