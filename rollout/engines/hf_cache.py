"""Keys and values of the samples under way, one row (slot) each, as a transformers Cache.

A forward pass is one of two kinds. Prefill: the pass sees only its own tokens, and `store` then copies the rows of the
distinct prompts into the slots of all samples that share them. Decode: one token per row is written at this row's own
position, and attention sees the first `num_rows` slots up to `visible`.

Shapes: P rows of a prefill, R slots, T positions, N key-value heads, D width of a head, B rows of a decode step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(slots=True)
class _Window:
    """Where all layers read and write in the pass under way."""

    num_slots: int
    capacity: int
    num_rows: int = 0
    visible: int = 0  # positions that attention sees
    write: Tensor | None = None  # (B * N), flat index (slot * N + head) * capacity + position; None while prefilling


class SlotLayer(CacheLayerMixin):
    """One layer: keys and values of shape (R, N, T, D)."""

    def __init__(self, window: _Window) -> None:
        super().__init__()
        self.window = window
        self.fresh: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._empty(key_states)
        self.values = self._empty(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take the states (B, N, L, D) of this pass; return what attention may see, (B, N, T, D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.window.write is None:
            self.fresh = (key_states, value_states)
            return key_states, value_states
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def store(self, slots_B: Tensor, *, source_B: Tensor) -> None:
        """Copy rows `source_B` of the prefill that has just run into `slots_B`."""
        assert self.fresh is not None
        for store_RNTD, fresh_PNLD in zip((self.keys, self.values), self.fresh, strict=True):
            store_RNTD[slots_B, :, : fresh_PNLD.shape[2]] = fresh_PNLD[source_B]
        self.fresh = None

    def move(self, source_B: Tensor, *, target_B: Tensor, length: int) -> None:
        if self.is_initialized:
            self.keys[target_B, :, :length] = self.keys[source_B, :, :length]
            self.values[target_B, :, :length] = self.values[source_B, :, :length]

    def grow(self) -> None:
        """Take the capacity of the window, keeping what is stored."""
        if self.is_initialized:
            self.keys = self._grown(self.keys)
            self.values = self._grown(self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.window.write is None else self.window.visible), 0

    def get_seq_length(self) -> int:
        return 0 if self.window.write is None else self.window.visible - 1

    def get_max_length(self) -> int:
        return self.window.capacity

    def _write(self, store_RNTD: Tensor, states_BN1D: Tensor) -> Tensor:
        window = self.window
        assert window.write is not None
        store_RNTD.view(-1, store_RNTD.shape[3]).index_copy_(0, window.write, states_BN1D.flatten(0, 2))
        return store_RNTD[: window.num_rows, :, : window.visible]

    def _empty(self, states: Tensor) -> Tensor:
        # Zeros: positions not yet written are masked, but masked garbage that is not finite would still spread.
        shape = (self.window.num_slots, states.shape[1], self.window.capacity, states.shape[3])
        return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def _grown(self, store_RNTD: Tensor) -> Tensor:
        old_slots, num_heads, old_capacity, width = store_RNTD.shape
        grown = store_RNTD.new_empty((self.window.num_slots, num_heads, self.window.capacity, width))
        grown[:old_slots, :, :old_capacity] = store_RNTD
        grown[:old_slots, :, old_capacity:] = 0
        grown[old_slots:] = 0
        return grown


class SlotCache(Cache):
    """All layers. Grows as needed, up to `max_slots` rows of `max_length` tokens.

    The length grows in small steps: a step of attention reads all of it, so a copy now and then is cheap, while rows
    much longer than what is read would spread the reads over memory (measured: up to four times slower on a CPU).
    """

    def __init__(self, num_layers: int, *, max_slots: int, max_length: int) -> None:
        self.window = _Window(num_slots=min(16, max_slots), capacity=16)
        self.max_slots, self.max_length = max_slots, _rounded(max_length)
        self.slots: list[SlotLayer] = [SlotLayer(self.window) for _ in range(num_layers)]
        super().__init__(layers=list(self.slots))

    def begin_prefill(self) -> None:
        self.window.write = None

    def begin_decode(self, position_B: Tensor, *, length: int) -> int:
        """The next pass writes row i at position_B[i] of slot i; `length` is the longest row after that, in tokens.

        Returns how many positions attention will see: `length` rounded up, which the kernels like better.
        """
        num_rows = position_B.shape[0]
        self.reserve(num_rows, length=length)
        self.window.visible = _rounded(length)
        self.window.num_rows = num_rows
        num_heads = self.slots[0].keys.shape[1]
        row_BN = torch.arange(num_rows * num_heads, device=position_B.device).view(num_rows, num_heads)
        self.window.write = (row_BN * self.window.capacity + position_B[:, None]).flatten()
        return self.window.visible

    def store(self, slots_B: Tensor, *, source_B: Tensor) -> None:
        """Give slot slots_B[i] the states of row source_B[i] of the prefill that has just run."""
        for layer in self.slots:
            layer.store(slots_B, source_B=source_B)

    def move(self, source_B: Tensor, *, target_B: Tensor, length: int) -> None:
        """Copy the first `length` positions of the source slots over the target slots."""
        for layer in self.slots:
            layer.move(source_B, target_B=target_B, length=length)

    def reserve(self, num_slots: int, *, length: int) -> None:
        """Make room for so many slots of so many tokens."""
        window = self.window
        if num_slots <= window.num_slots and length <= window.capacity:
            return
        if num_slots > window.num_slots:
            window.num_slots = min(max(num_slots, 2 * window.num_slots), self.max_slots)
        if length > window.capacity:
            window.capacity = min(_rounded(max(length, window.capacity * 9 // 8)), self.max_length)
        for layer in self.slots:
            layer.grow()

    def forget(self) -> None:
        """Drop what is stored, and the length it had grown to."""
        self.window.capacity = 16
        for layer in self.slots:
            layer.is_initialized = False

    def release(self) -> None:
        """Drop what is stored, and its memory."""
        self.forget()
        for layer in self.slots:
            layer.keys = layer.values = torch.empty(0)

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.slots if layer.keys is not None)


def _rounded(length: int) -> int:
    return -(-length // 16) * 16
