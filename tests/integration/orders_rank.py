"""One rank that works on order, started by torchrun; rank 0 gives some orders at once and leaves without a word."""

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore

from trainer.parallel.orders import Orders
from trainer.parallel.start import seat

ORDERS = 5


def main() -> None:
    orders = Orders(seat())
    if orders.leads:
        for _ in range(ORDERS):
            orders.give("work")
        return
    store = orders.group_store()
    assert isinstance(store, PrefixStore)
    store.underlying_store.wait([f"order/{ORDERS - 1}"], timedelta(seconds=20))
    taken = [orders.take()[0]]
    while taken[-1] != "leave":
        taken.append(orders.take()[0])
    assert taken == ["work"] * ORDERS + ["leave"]


if __name__ == "__main__":
    main()
