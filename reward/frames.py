"""Messages between a scorer and its workers: a 4-byte big-endian length, then JSON in ASCII."""

import json
from collections.abc import Iterator
from typing import Any, NoReturn

HEADER_BYTES = 4
MAX_ANSWER_BYTES = 16 * 2**20


def encode(message: object) -> bytes:
    """One frame. Raises ValueError for NaN and infinity, which JSON has no words for."""
    body = _ENCODER.encode(message).encode("ascii")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def decode(body: bytes) -> Any:
    """The message in one frame's body. Raises ValueError if it is no JSON."""
    return _DECODER.decode(body.decode("ascii"))


class FrameBuffer:
    """Bytes in any pieces -> whole messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes. Raises ValueError for a frame that no worker of ours would send."""
        self._bytes += data
        start = 0
        while len(self._bytes) >= start + HEADER_BYTES:
            body_start = start + HEADER_BYTES
            length = int.from_bytes(self._bytes[start:body_start], "big")
            if length > MAX_ANSWER_BYTES:
                raise ValueError(f"frame of {length} bytes")
            if len(self._bytes) < body_start + length:
                break
            yield decode(bytes(self._bytes[body_start : body_start + length]))
            start = body_start + length
        del self._bytes[:start]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse)
