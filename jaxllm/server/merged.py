"""Merges several asynchronous streams into one."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def merged(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all streams, each with the index of its stream. The first error ends all
    streams. All are closed at the end."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    # Bounded: a stream that waits for its turn merges its next outputs.
    queue: asyncio.Queue[tuple[int, Item] | BaseException | None] = asyncio.Queue(len(streams))

    async def pump(place: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await queue.put((place, item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(*one)) for one in enumerate(streams)]
    try:
        num_left = len(pumps)
        while num_left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
