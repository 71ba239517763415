"""Bring tensors with Hugging Face names into a model whose layers are fused, renamed and sharded.

The model's own loader knows where each tensor goes; it takes tens of milliseconds of Python. So it runs once, watched:
when all that it does to the weights is to copy slices of what came in, these copies are kept and run as one operation
from then on. A model whose loader does more (quantizes, packs, transposes into new memory) is loaded anew every time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)
Named = Sequence[tuple[str, Tensor]]
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
Load = Callable[[Iterable[tuple[str, Tensor]]], object]


class Installer:
    """Installs one version after the other into `model`, from the same staging memory.

    load: the model's own loader of named tensors. finish: what must follow it, if anything.
    """

    def __init__(self, model: nn.Module, load: Load, finish: Callable[[], object] | None = None) -> None:
        self._model = model
        self._load = load
        self._finish = finish
        self._copies: tuple[list[Tensor], list[Tensor]] | None = None
        self._source: tuple[int, ...] = ()

    @torch.no_grad()
    def install(self, tensors: Named) -> None:
        """Overwrite the weights. ValueError where the model has no place for a tensor."""
        source = tuple(tensor.data_ptr() for _, tensor in tensors)
        if self._copies is not None and source == self._source:
            torch._foreach_copy_(*self._copies)
            return
        if self._source and self._copies is None:
            self._run(tensors)
        else:
            self._record(tensors)
        self._source = source

    @property
    def replays(self) -> bool:
        """Whether later versions are installed by the recorded copies alone."""
        return self._copies is not None

    def _run(self, tensors: Named) -> None:
        self._load(iter(tensors))
        if self._finish is not None:
            self._finish()

    def _record(self, tensors: Named) -> None:
        self._copies = None
        before = storages_of(self._model)
        with Watch(weights=before, incoming={storage_of(tensor) for _, tensor in tensors}) as watch:
            self._run(tensors)
        homeless = [name for name, tensor in tensors if not watch.has_read(tensor)]
        if homeless:
            raise ValueError(f"the model has no place for {', '.join(homeless[:5])} ({len(homeless)} in all)")
        others = watch.others | watch.overlapping_fills()
        if others or storages_of(self._model) != before:
            facts = {"operations": sorted(others)[:5]}
            logger.warning("weights are loaded anew at each push", extra={"facts": facts})
        else:
            self._copies = (watch.targets, watch.sources)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each copy from incoming memory into the weights, and the names of all other writes to them.

    A constant written beside what is copied (the padding of a vocabulary) is there already when copies are replayed.
    """

    def __init__(self, *, weights: set[int], incoming: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets: list[Tensor] = []
        self.sources: list[Tensor] = []
        self.others: set[str] = set()
        self._weights = weights
        self._incoming = incoming
        self._fills: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and self._is_plain(args[0], args[1]):
            self.targets.append(args[0].detach())
            self.sources.append(args[1].detach())
        else:
            self._note(func, [one for one in written(func, args, kwargs) if storage_of(one) in self._weights])
        return func(*args, **kwargs)

    def _note(self, func: torch._ops.OpOverload, touched: list[Tensor]) -> None:
        touched = [tensor for tensor in touched if tensor.numel()]
        if touched and func in FILLS:
            self._fills += touched
        elif touched:
            self.others.add(str(func))

    def _is_plain(self, target: Tensor, source: Tensor) -> bool:
        return storage_of(target) in self._weights and storage_of(source) in self._incoming

    def overlapping_fills(self) -> set[str]:
        """Constants that share memory with a copy: which of the two came last is not kept."""
        copied = [extent(target) for target in self.targets]
        shared = [fill for fill in self._fills if any(overlap(extent(fill), one) for one in copied)]
        return {"fill_"} if shared else set()

    def has_read(self, tensor: Tensor) -> bool:
        """Whether any part of an incoming tensor was copied, or whether that cannot be told."""
        if self.others:
            return True
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(begin <= source.data_ptr() < end for source in self.sources)


def written(func: torch._ops.OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    found: list[object] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[at] if at < len(args) else kwargs.get(argument.name))
    flat = [one for value in found for one in (value if isinstance(value, (list, tuple)) else [value])]
    return [one for one in flat if isinstance(one, Tensor)]


def extent(tensor: Tensor) -> tuple[int, int]:
    """First and last byte, gaps between the elements included."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * stride for length, stride in steps) * tensor.element_size()
    return tensor.data_ptr(), tensor.data_ptr() + last + tensor.element_size() - 1


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def storages_of(model: nn.Module) -> set[int]:
    """Addresses of the memory that holds parameters and buffers."""
    return {storage_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
