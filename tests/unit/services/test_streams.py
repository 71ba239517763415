"""The serving side of a stream: order, ends, errors, and nothing left behind when the client goes away."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from services.streams import Outbox


async def nothing_left() -> None:
    for _ in range(5):  # an inner generator is closed by the loop, some turns after the outer one
        await asyncio.sleep(0)
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if name.startswith("stream-")]


async def forever() -> None:
    await asyncio.Event().wait()


async def test_replies_come_in_order_and_the_reader_s_end_is_the_end() -> None:
    outbox: Outbox[int] = Outbox()

    async def read() -> None:
        for number in range(3):
            outbox.put(number)

    assert [reply async for reply in outbox.replies(read())] == [0, 1, 2]
    await nothing_left()


async def test_what_was_put_before_the_stream_was_read_is_told() -> None:
    outbox: Outbox[str] = Outbox()
    outbox.put("credit")
    async with aclosing(as_generator(outbox.replies(forever()))) as replies:
        assert await anext(replies) == "credit"
    await nothing_left()


async def test_an_error_of_the_reader_ends_the_stream_with_it() -> None:
    outbox: Outbox[int] = Outbox()

    async def read() -> None:
        outbox.put(1)
        raise ValueError("bad request")

    got = []
    with pytest.raises(ValueError, match="bad request"):
        async for reply in outbox.replies(read()):
            got.append(reply)
    assert got == [1]
    await nothing_left()


async def test_a_client_that_goes_away_while_nothing_is_said_leaves_no_task() -> None:
    outbox: Outbox[int] = Outbox()

    async def serve() -> None:
        async for _ in outbox.replies(forever()):
            raise AssertionError("nothing was put")

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await nothing_left()
    outbox.put(1)  # a late reply disturbs nobody


async def as_generator(replies: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    """What gRPC makes of it: an iteration that may be closed at a yield."""
    async for reply in replies:
        yield reply
