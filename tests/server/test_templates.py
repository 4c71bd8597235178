"""Which thread renders which conversation."""

import asyncio
import threading

import pytest

from jaxllm.frontend.tokenizer import LONG_TEXT
from jaxllm.server.templates import Templates


@pytest.mark.parametrize(
    "template, size, holds_up_others",
    [(None, 100, True), ("{{ messages }}", 100, False), (None, LONG_TEXT + 1, False)],
)
def test_who_is_slow_holds_up_only_who_is_slow(template, size, holds_up_others):
    templates = Templates(10)
    go_on = threading.Event()

    async def run():
        waiting = asyncio.create_task(templates.run(template, None, lambda: go_on.wait(120), size))
        await asyncio.sleep(0)  # it is in its thread's queue
        other = asyncio.create_task(templates.run(None, None, lambda: "done", 100))
        await asyncio.wait([other], timeout=1 if holds_up_others else 60)
        assert other.done() is not holds_up_others
        go_on.set()
        assert await waiting
        assert await other == "done"

    try:
        asyncio.run(run())
    finally:
        go_on.set()
        templates.close()
