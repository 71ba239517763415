"""One rank of a trainer in which each holds the whole weights, started by torchrun; it writes what it made for pushes.

Told by two arguments: the folder, and the run's config as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.compose import load_json
from services.ranks.rank import follow
from services.ranks.work import TrainerWork
from trainer.parallel.orders import Orders
from trainer.parallel.start import seat
from trainer.pushes.gather import Fill
from trainer.pushes.outgoing import Outgoing

MADE: list[Outgoing] = []
FILLED: list[int] = []


def watch() -> None:
    make, fill = Outgoing.__init__, Fill.__call__

    def made(this: Outgoing, *arguments: Any, **named: Any) -> None:
        MADE.append(this)
        make(this, *arguments, **named)

    def filled(this: Fill) -> Tensor:
        FILLED.append(1)
        return fill(this)

    Outgoing.__init__ = made  # type: ignore[method-assign,assignment]
    Fill.__call__ = filled  # type: ignore[method-assign,assignment]


def lead(folder: Path, config: str) -> None:
    """Two pushes without a server, as the service makes them."""
    work = TrainerWork(load_json(config), folder, Orders(seat()))
    work.load()
    for _ in range(2):
        work.pack()
        if work.outgoing.streamed:
            work.stream()
            work.outgoing.conclude()
    work.leave()


def main() -> None:
    folder, config = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    watch()
    rank = seat().rank
    if rank:
        follow(seat())
    else:
        lead(folder, config)
    (made,) = MADE
    told = {"buckets": len(made.plan), "places": len(made._fills), "buffers": len(made.buffers), "fills": len(FILLED)}
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    os._exit(0)


if __name__ == "__main__":
    main()
