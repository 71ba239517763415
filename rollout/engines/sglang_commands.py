"""What is said to SGLang's scheduler processes over their own RPC, and what they answer: scalars and text only."""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protos import BeginPushRequest

METHOD = "offbeat"
"""Name under which SGLang's RPC carries our commands."""
Word = Literal["open", "poll", "swap", "drop", "pause", "resume", "sleep", "wake"]
State = Literal["done", "pending", "corrupt", "failed"]
STATES: tuple[State, ...] = ("done", "pending", "corrupt", "failed")
"""Worst last: several ranks together are in the worst state of any of them."""


@dataclass(frozen=True, slots=True)
class Reply:
    """How a command went; `text` is a number for a swap, else a sentence."""

    state: State
    text: str = ""


def pack_reply(reply: Reply) -> str:
    """One line of text."""
    return f"{reply.state}:{reply.text}"


def unpack_reply(message: str) -> Reply:
    """The inverse. What is no reply of ours is SGLang's own error text."""
    word, _, text = message.partition(":")
    for state in STATES:
        if word == state:
            return Reply(state, text)
    return Reply("failed", message)


def pack_request(request: BeginPushRequest) -> str:
    """Base64, because SGLang's RPC carries no bytes."""
    return b64encode(request.SerializeToString()).decode("ascii")


def unpack_request(text: str) -> BeginPushRequest:
    """The inverse."""
    return BeginPushRequest.FromString(b64decode(text, validate=True))


def pack_checksums(checksums: Sequence[int]) -> str:
    """Numbers of 64 bits, by commas."""
    return ",".join(map(str, checksums))


def unpack_checksums(text: str) -> list[int]:
    """The inverse."""
    return [int(one) for one in text.split(",")] if text else []
