"""The process in which reward functions run: `python -P -m reward.worker`, killed when a function hangs.

in (stdin):   the settings, then chunks: lists of [prompt, response, ground_truth, data_source, extra]
out (stdout): {"stage": ...} while starting, {"ready": [...]} or {"refused": why}; then one answer per item, in order:
              [value, breakdown, answer or null] or [failure kind, message]

An answer is written before the next item is begun, so the first unanswered item is the one that hangs or crashes.
Imports as little as possible: a worker that was killed must be back within a tenth of a second.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from reward.evaluate import Evaluator, WeightedFunction
from reward.frames import HEADER_BYTES, decode, encode
from reward.function import Outcome, RewardError, RewardSpec, Score, ScoreItem, one_line
from reward.load import configure, load

PR_SET_PDEATHSIG = 1


class Channel:
    """The two pipes to the parent, out of reach of whatever a reward function prints or reads."""

    def __init__(self) -> None:
        self._in: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._out = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def receive(self) -> Any:
        """The next message; None at the end of the stream, when the parent is gone."""
        header = self._in.read(HEADER_BYTES)
        length = int.from_bytes(header, "big")
        body = self._in.read(length) if len(header) == HEADER_BYTES else b""
        return decode(body) if body and len(body) == length else None

    def send(self, message: object) -> None:
        """Write one message, waiting as long as the pipe is full."""
        rest = memoryview(encode(message))
        while rest:
            rest = rest[os.write(self._out, rest) :]


def main() -> None:
    """Serve the parent until it closes the pipe. A function that calls sys.exit ends the process at once."""
    channel = Channel()
    try:
        settings = channel.receive()
        if settings is not None:
            _serve(channel, settings)
    except SystemExit as leave:
        # Not a normal exit: threads that a reward function left behind could hold that up for ever.
        os._exit(leave.code if isinstance(leave.code, int) else leave.code is not None)


def _serve(channel: Channel, settings: Mapping[str, Any]) -> None:
    _limit_process(settings["memory_limit_mb"])
    # Prints of user functions appear at once, and are not lost when the worker is killed.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        evaluator, specs = _start(channel, settings)
    except RewardError as error:
        channel.send({"refused": str(error)})
        return
    channel.send({"ready": [_describe(spec) for spec in specs]})
    while (chunk := channel.receive()) is not None:
        for prompt, response, ground_truth, data_source, extra in chunk:
            item = ScoreItem(
                prompt=prompt, response=response, ground_truth=ground_truth, data_source=data_source, extra=extra
            )
            channel.send(_answer(evaluator.score(item)))


def _start(channel: Channel, settings: Mapping[str, Any]) -> tuple[Evaluator, list[RewardSpec]]:
    functions = [_load(channel, function) for function in settings["functions"]]
    clip = settings["reward_clip"]
    evaluator = Evaluator(functions, clip=None if clip is None else (clip[0], clip[1]))
    if settings["self_test"]:
        evaluator.self_test(lambda step: channel.send({"stage": step}))
    return evaluator, [function.spec for function in functions]


def _load(channel: Channel, function: Mapping[str, Any]) -> WeightedFunction:
    channel.send({"stage": f"loading {function['name']}"})
    source = function["source"]
    try:
        spec = load(
            function["target"], name=function["name"], source=None if source is None else source.encode("latin-1")
        )
        configured = configure(spec, function["parameters"])
    except RewardError as error:
        raise RewardError(f"reward function {function['name']!r}: {error}") from error
    return WeightedFunction(
        spec=configured, weight=function["weight"], has_default_parameters=not function["parameters"]
    )


def _answer(outcome: Outcome) -> list[object]:
    if isinstance(outcome, Score):
        return [outcome.value, outcome.breakdown, outcome.answer]
    return [outcome.kind, outcome.message]


def _describe(spec: RewardSpec) -> dict[str, object]:
    samples = [
        [[item.prompt, item.response, item.ground_truth, item.data_source, dict(item.extra)], expected]
        for item, expected in spec.self_test
    ]
    return {"name": spec.name, "version": one_line(spec.version, limit=64), "self_test": samples}


def _limit_process(memory_limit_mb: int | None) -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory_limit_mb is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_limit_mb * 2**20, memory_limit_mb * 2**20))
    if sys.platform == "linux":
        import ctypes
        import signal

        # The end of stdin tells an idle worker that its parent died; this tells one that is stuck in a function.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
