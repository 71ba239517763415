"""Many functions and weights -> one reward. The face of this room: start, score, describe, close."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward.config import FunctionConfig, RewardConfig
from reward.function import Outcome, RewardError, ScoreItem
from reward.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDescription:
    """A function as it was loaded: what a peer may know of it, and samples by which anyone can check it."""

    name: str
    version: str
    target: str
    weight: float
    parameters: Mapping[str, Any]
    self_test: tuple[tuple[ScoreItem, float], ...]

    @property
    def route(self) -> str:
        """name@version, as it is stored with every sample."""
        return f"{self.name}@{self.version}"


class Scorer:
    """Scores items by the configured functions in worker processes.

    total = sum(weight * value), then clipped to reward_clip. The breakdown holds each function's unweighted value under
    its name and its parts as name/part. If one function fails, the item's outcome is that Failure, never a 0.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._pool = Pool(config)
        self._functions: tuple[FunctionDescription, ...] = ()

    async def __aenter__(self) -> "Scorer":
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close."""
        await self.close()

    async def start(self) -> None:
        """Load every function in a worker and run its self-test there.

        Raises RewardError that names the function and, for a self-test, the failing sample; then no process is left.
        """
        try:
            described = await self._pool.start()
        except BaseException:
            await self._pool.close()
            raise
        self._functions = tuple(
            _description(config, said) for config, said in zip(self._config.functions, described, strict=True)
        )

    async def score(self, items: Sequence[ScoreItem]) -> list[Outcome]:
        """One Score or Failure per item, in order. Raises RewardError if no worker can be had any more."""
        return await self._pool.score(items)

    async def close(self) -> None:
        """Kill the workers and wait until they are gone. Calls of `score` still open raise RewardError."""
        await self._pool.close()

    @property
    def routes(self) -> list[str]:
        """name@version of every function, in the order of the config."""
        return [function.route for function in self.describe()]

    @property
    def pool(self) -> Pool:
        """The workers, for health and for metrics: fault, pids, num_waiting, num_restarts."""
        return self._pool

    def describe(self) -> tuple[FunctionDescription, ...]:
        """The loaded functions, in the order of the config. Raises RewardError before `start`."""
        if not self._functions:
            raise RewardError("the scorer is not started")
        return self._functions


def _description(config: FunctionConfig, said: Mapping[str, Any]) -> FunctionDescription:
    return FunctionDescription(
        name=said["name"],
        version=said["version"],
        target=config.target,
        weight=config.weight,
        parameters=config.parameters,
        self_test=tuple((_item(fields), expected) for fields, expected in said["self_test"]),
    )


def _item(fields: Sequence[Any]) -> ScoreItem:
    prompt, response, ground_truth, data_source, extra = fields
    return ScoreItem(prompt=prompt, response=response, ground_truth=ground_truth, data_source=data_source, extra=extra)
