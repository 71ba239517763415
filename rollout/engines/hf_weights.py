"""The parameters of a model by name: listed for a push, and replaced all or none."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Weights:
    """Parameters by name. A tied parameter is listed once and answers to each of its names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._listed = dict(model.named_parameters())
        self._by_name = dict(model.named_parameters(remove_duplicate=False))

    def describe(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype such as float32, shape) of each parameter, in the order of the model."""
        return [(name, dtype_name(one), tuple(one.shape)) for name, one in self._listed.items()]

    @torch.inference_mode()
    def copy_(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite the named parameters. ValueError with every mistake, and nothing touched, if one does not fit."""
        given = list(tensors)
        mistakes = [mistake for name, one in given if (mistake := self._mistake(name, one))]
        if len({name for name, _ in given}) < len(given):
            mistakes.append("a name comes twice")
        if not given:
            mistakes.append("there are no tensors")
        if mistakes:
            raise ValueError("weights refused: " + "; ".join(mistakes))
        for name, one in given:
            self._by_name[name].copy_(one)

    def _mistake(self, name: str, tensor: Tensor) -> str | None:
        parameter = self._by_name.get(name)
        if parameter is None:
            return f"the model has no parameter {name}"
        if tensor.shape != parameter.shape:
            return f"{name} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}"
        if tensor.dtype != parameter.dtype:
            return f"{name} has dtype {dtype_name(tensor)}, not {dtype_name(parameter)}"
        return None


def dtype_name(tensor: Tensor) -> str:
    """float32 rather than torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")
