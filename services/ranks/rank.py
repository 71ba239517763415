"""A rank of the trainer other than 0: no actor, nothing on the wire; it does what rank 0 tells it, to the end."""

from __future__ import annotations

import logging

from services.errors import Broken, OffbeatError
from services.faults import fault
from services.ranks.work import ordered_work
from trainer.parallel.orders import Orders
from trainer.parallel.start import Seat

logger = logging.getLogger(__name__)


def follow(place: Seat) -> None:
    """Returns when rank 0 says leave. OffbeatError for what cannot be loaded, Broken for whatever else goes wrong;
    rank 0 learns of it by this process' end."""
    try:
        orders = Orders(place)
        name, payload = orders.take()
        work = ordered_work(payload, orders)
        work.load()
        while name != "leave":
            name, payload = orders.take()
            fault(f"trainer-rank-{place.rank}", f"order.{name}")
            work.obey(name, payload)
    except OffbeatError:
        raise
    except Exception as error:
        logger.exception("the rank broke at work")
        raise Broken(f"rank {place.rank}: {type(error).__name__}: {error}") from error
