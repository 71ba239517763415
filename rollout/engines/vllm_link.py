"""The worker's end of a push: a thread that receives while the worker decodes, told so over a socket of this machine.

vLLM serves its own calls between two decode steps; over this socket a push begins at once and never waits for a step.

engine --OPEN request--> worker: join the group, receive --OPENED-->  --ARRIVED checksums-->
       --DROP---------->         forget it               --DROPPED-->
       --RELEASE------->         free staging memory     --RELEASED-->
"""

import json
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from enum import IntEnum

from protos import BeginPushRequest
from rollout.engine import TransferFailed
from rollout.weights import Receiver

logger = logging.getLogger(__name__)
PATH_VARIABLE = "OFFBEAT_VLLM_SOCKET"
HEADER = struct.Struct("!IBI")
POLL_SECONDS = 0.0005


class Kind(IntEnum):
    """What a frame is; its header also holds the number of the push."""

    HELLO = 1
    OPEN = 2
    OPENED = 3
    ARRIVED = 4
    FAILED = 5
    DROP = 6
    DROPPED = 7
    RELEASE = 8
    RELEASED = 9


def frame(kind: Kind, push: int, payload: bytes = b"") -> bytes:
    """Length of the payload, kind, number of the push, payload."""
    return HEADER.pack(len(payload), kind, push) + payload


class Link:
    """Serves one receiver; the thread ends with the connection."""

    def __init__(
        self, receiver: Receiver, *, rank: int, gpu: str, on_thread: Callable[[], None], forget: Callable[[], None]
    ) -> None:
        """rank: of this receiver among the engine's. on_thread: what the thread does first.

        forget: called when staging memory goes, for whoever else still holds it.
        """
        self._receiver, self._rank, self._on_thread, self._forget = receiver, rank, on_thread, forget
        self._push: int | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(os.environ[PATH_VARIABLE])
        self._send(Kind.HELLO, 0, json.dumps({"rank": rank, "gpu": gpu}).encode())
        threading.Thread(target=self._run, name="offbeat-push", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._socket.close()

    def _run(self) -> None:
        try:
            self._on_thread()
            while True:
                readable, _, _ = select.select([self._socket], [], [], None if self._push is None else POLL_SECONDS)
                if readable:
                    self._serve()
                self._tell_news()
        except (OSError, ValueError) as error:
            logger.info("the engine's end of the push socket is gone: %s", error)

    def _serve(self) -> None:
        length, kind, push = HEADER.unpack(self._read(HEADER.size))
        payload = self._read(length)
        if kind == Kind.OPEN:
            self._send(Kind.OPENED, push, self._open(push, payload))
        elif kind == Kind.DROP:
            self._push = None
            self._receiver.drop()
            self._forget()
            self._send(Kind.DROPPED, push)
        elif kind == Kind.RELEASE:
            self._receiver.release()
            self._forget()
            self._send(Kind.RELEASED, push)

    def _open(self, push: int, payload: bytes) -> bytes:
        try:
            self._receiver.open(BeginPushRequest.FromString(payload), rank_offset=self._rank)
        except Exception as error:  # of torch, of the group: the engine's end tells whoever opened the push
            return f"{type(error).__name__}: {error}".encode()
        self._push = push
        return b""

    def _tell_news(self) -> None:
        if self._push is None:
            return
        try:
            sums = self._receiver.poll()
        except TransferFailed as error:
            self._send(Kind.FAILED, self._push, str(error).encode())
        else:
            if sums is None:
                return
            self._send(Kind.ARRIVED, self._push, struct.pack(f"!{len(sums)}Q", *sums))
        self._push = None

    def _send(self, kind: Kind, push: int, payload: bytes = b"") -> None:
        self._socket.sendall(frame(kind, push, payload))

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            piece = self._socket.recv(length - len(data))
            if not piece:
                raise ConnectionError("closed")
            data += piece
        return data
