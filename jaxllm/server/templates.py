"""Renders chat templates so that a slow one delays no requests that use the model's own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jaxllm.frontend.chat_template import Conversation, Renderer
from jaxllm.frontend.template_process import TemplateProcess
from jaxllm.frontend.tokenizer import LONG_TEXT
from jaxllm.openai.chat import is_foreign

Result = TypeVar("Result")


class Templates(Renderer):
    """Two processes that render, each with a thread that waits for it. One is for templates and
    variables from requests, so that other requests need not wait for them. Its thread also works on
    long conversations."""

    def __init__(self, timeout_s: float):
        self._own = _Lane("template", timeout_s)
        self._foreign = _Lane("foreign template", timeout_s)

    def start(self) -> None:
        """Start a process before the first request arrives."""
        self._own.process.start()

    def render(self, conversation: Conversation, *, is_foreign: bool) -> str:
        return self._lane(is_foreign).process.render(conversation)

    async def run(
        self,
        chat_template: object,
        chat_template_kwargs: object,
        work: Callable[[], Result],
        size: int,
    ) -> Result:
        """Run work that renders about `size` characters with these arguments of a request, in the
        thread of its kind."""
        is_slow = size > LONG_TEXT or is_foreign(chat_template, chat_template_kwargs)
        thread = self._lane(is_slow).thread
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    def close(self) -> None:
        for lane in (self._own, self._foreign):
            lane.process.close()
            lane.thread.shutdown(wait=False, cancel_futures=True)

    def _lane(self, is_foreign: bool) -> "_Lane":
        return self._foreign if is_foreign else self._own


class _Lane:
    """A process, and the thread that waits for it."""

    def __init__(self, name: str, timeout_s: float):
        self.process = TemplateProcess(timeout_s)
        self.thread = ThreadPoolExecutor(1, name)
