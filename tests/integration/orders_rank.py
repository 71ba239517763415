"""One rank that works on order, started by torchrun; rank 0 gives one order and leaves without a word."""

from trainer.parallel.orders import Orders
from trainer.parallel.start import seat


def main() -> None:
    orders = Orders(seat())
    if orders.leads:
        orders.give("work")
        return
    taken = [orders.take()[0]]
    while taken[-1] != "leave":
        taken.append(orders.take()[0])
    assert taken == ["work", "leave"]


if __name__ == "__main__":
    main()
