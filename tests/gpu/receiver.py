"""A process with a `Receiver` on a GPU, told what to do line by line: one JSON command in, one JSON answer out."""

from __future__ import annotations

import base64
import json
import sys
import time

import torch

from protos import BeginPushRequest
from rollout.engine import TransferFailed
from rollout.weights import Receiver


def answer(receiver: Receiver, command: dict[str, object]) -> dict[str, object]:
    if "open" in command:
        receiver.open(BeginPushRequest.FromString(base64.b64decode(str(command["open"]))))
        return {"opened": True}
    if "drop" in command:
        receiver.drop()
        return {"dropped": True}
    began = time.monotonic()
    try:
        receiver.wait(command["wait"])  # type: ignore[arg-type]
    except TransferFailed as error:
        return {"failed": str(error), "seconds": time.monotonic() - began}
    sums = {name: float(tensor.double().sum()) for name, tensor in receiver.tensors()}
    receiver.taken()
    return {"sums": sums}


def main() -> None:
    receiver = Receiver(torch.device(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(answer(receiver, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
