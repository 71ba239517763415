"""What can go wrong between services, and how it looks on the wire.

OffbeatError
  ConfigError          the user's config is wrong: told at start, exit code 2
  Replaced             another process has taken this service's place: told, exit code 3
  Broken               a service that had joined can work no more; a fresh process may: exit code 4
  RunStopped           a guard of the trainer has ended the run; nothing is started again: exit code 5
  PeerError            a call to another service failed
    PeerUnavailable    it is not there, or went away (worth another try)
    PeerRefused        it is there and says no: fenced, wrong state, bad request (never retried)
  PushFailed           a version could not be brought to a server
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a config is checked without gRPC
    import grpc


class OffbeatError(Exception):
    """Base of all errors that are told to a user as one sentence."""


class ConfigError(OffbeatError):
    """Every mistake of a config, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Replaced(OffbeatError):
    """The run goes on without this process; starting it again would push out its successor."""


class Broken(OffbeatError):
    """What failed is in the service's log; the launcher starts it again."""


class RunStopped(OffbeatError):
    """The run as it is would end the same way again; its settings or its data have to change."""


class PeerError(OffbeatError):
    """A call to a peer failed; `code` is its gRPC status."""

    def __init__(self, message: str, *, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


class PeerUnavailable(PeerError):
    """The peer is not there, is overloaded, or did not answer in time."""


class PeerRefused(PeerError):
    """The peer answered no."""


class PushFailed(OffbeatError):
    """A push did not reach a server."""


# UNKNOWN is what a malformed message gives and bare CANCELLED is what a shut-down stream gives: neither is retried.
RETRYABLE = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}


def from_status(error: grpc.aio.AioRpcError, *, what: str) -> PeerError:
    """Turn a gRPC status into one of our errors, saying what was tried."""
    code = error.code()
    text = f"{what}: {code.name}: {error.details() or 'no details'}"
    return PeerUnavailable(text, code=code) if code.name in RETRYABLE else PeerRefused(text, code=code)
