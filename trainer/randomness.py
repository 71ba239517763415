"""The states of the random generators of torch, CUDA, numpy and python as JSON, without pickle."""

import random
from typing import Any

import numpy as np
import torch


def step_generator(seed: int, step: int) -> torch.Generator:
    """A generator on the CPU that depends on these two numbers only: a step that is trained again draws the same."""
    mixed = np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]))


def random_states() -> dict[str, Any]:
    """States of the global generators: bytes as hex, floats as float.hex, integers as they are."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, integers, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()],
        "numpy": [name, np.asarray(keys, np.uint32).tobytes().hex(), position, has_gauss, float(gauss).hex()],
        "python": [version, list(integers), None if next_gauss is None else next_gauss.hex()],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Puts back what `random_states` gave; CUDA generators only when there are as many devices as then."""
    torch.set_rng_state(_bytes(states["torch"]))
    if len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_bytes(state) for state in states["cuda"]])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state(
        (name, np.frombuffer(bytes.fromhex(keys), np.uint32), position, has_gauss, float.fromhex(gauss))
    )
    version, integers, next_gauss = states["python"]
    random.setstate((version, tuple(integers), None if next_gauss is None else float.fromhex(next_gauss)))


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
