"""Bringing named tensors into fused layers: watched once, then replayed."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from rollout.engines.install import Installer


class Fused(nn.Module):
    """q, k and v in one matrix, of which this shard holds the upper half; an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(6, 4))
        self.embed = nn.Parameter(torch.zeros(10, 4))
        self.head = self.embed
        self.loads = 0

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.loads += 1
        for name, tensor in tensors:
            if name == "embed":
                self.embed.data[:8].copy_(tensor)  # two padded rows
            elif name in "qkv":
                self.qkv.data.narrow(0, 2 * "qkv".index(name), 2).copy_(tensor.narrow(0, 0, 2))


class Padded(Fused):
    """Writes zeros into the rows of the embedding that no token has, as vLLM does."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(tensors)
        self.embed.data[8:].fill_(0)
        self.embed.data[10:].fill_(0)


class Zeroing(Fused):
    """Writes zeros over what it has copied."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(tensors)
        self.embed.data[7:].fill_(0)


class Packed(Fused):
    """Keeps its matrix transposed in memory of its own, as a CPU kernel wants it."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(tensors)
        self.qkv.data.mul_(2.0)


def version(number: float) -> list[tuple[str, Tensor]]:
    return [(name, torch.full((4, 4), number + at)) for at, name in enumerate("qkv")] + [
        ("embed", torch.full((8, 4), number + 9))
    ]


def again(staging: list[tuple[str, Tensor]], number: float) -> list[tuple[str, Tensor]]:
    for (_, place), (_, new) in zip(staging, version(number), strict=True):
        place.copy_(new)
    return staging


def rows(model: Fused) -> list[float]:
    return [*model.qkv[:, 0].tolist(), *model.embed[:, 0].tolist()]


def test_copies_are_recorded_once_and_replayed() -> None:
    model = Fused()
    installer = Installer(model, model.load_weights)
    staging = version(10.0)
    installer.install(staging)
    assert rows(model) == [10, 10, 11, 11, 12, 12, *[19] * 8, 0, 0]
    assert installer.replays
    installer.install(again(staging, 20.0))
    assert rows(model) == [20, 20, 21, 21, 22, 22, *[29] * 8, 0, 0]
    assert model.loads == 1


def test_padding_that_is_filled_beside_the_copies_does_not_hinder() -> None:
    model = Padded()
    installer = Installer(model, model.load_weights)
    staging = version(10.0)
    installer.install(staging)
    installer.install(again(staging, 20.0))
    assert rows(model)[6:] == [*[29] * 8, 0, 0] and model.loads == 1


def test_zeros_over_what_was_copied_are_written_every_time() -> None:
    model = Zeroing()
    installer = Installer(model, model.load_weights)
    staging = version(10.0)
    installer.install(staging)
    installer.install(again(staging, 20.0))
    assert rows(model)[6:] == [*[29] * 7, 0, 0, 0] and model.loads == 2


def test_new_staging_memory_is_recorded_anew() -> None:
    model = Fused()
    installer = Installer(model, model.load_weights)
    kept = version(10.0)
    installer.install(kept)
    installer.install(version(30.0))
    assert rows(model)[0] == 30 and model.loads == 2


def test_a_loader_that_does_more_than_copy_runs_every_time() -> None:
    model = Packed()
    installer = Installer(model, model.load_weights)
    staging = version(10.0)
    installer.install(staging)
    assert not installer.replays
    installer.install(again(staging, 20.0))
    assert rows(model)[:2] == [40, 40] and model.loads == 2


def test_what_follows_a_load_is_watched_too() -> None:
    model = Fused()
    installer = Installer(model, model.load_weights, finish=lambda: model.embed.data.add_(1.0))
    staging = version(10.0)
    installer.install(staging)
    installer.install(again(staging, 20.0))
    assert rows(model)[6] == 30 and not installer.replays


def test_replaced_parameters_are_not_replayed_into_old_memory() -> None:
    model = Fused()

    def swap_memory() -> None:
        model.qkv = nn.Parameter(model.qkv.data.clone())

    installer = Installer(model, model.load_weights, finish=swap_memory)
    staging = version(10.0)
    installer.install(staging)
    installer.install(again(staging, 20.0))
    assert rows(model)[0] == 20 and not installer.replays


def test_a_tensor_without_a_place_is_refused() -> None:
    model = Fused()
    installer = Installer(model, model.load_weights)
    with pytest.raises(ValueError, match=r"no place for bias \(1 in all\)"):
        installer.install([*version(1.0), ("bias", torch.zeros(3))])
