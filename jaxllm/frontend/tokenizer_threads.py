"""Threads that tokenize, off the event loop. Long texts delay each other, but no short text, and
forms of answers, which are compiled, delay each other, but no text."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jaxllm.frontend.tokenizer import LONG_TEXT
from jaxllm.media.images import has_images

Result = TypeVar("Result")


class TokenizerThreads:
    """One thread for short texts, one for long ones, and one for requests with forms."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, "tokenize")
        self._long = ThreadPoolExecutor(1, "tokenize-long")
        self._forms = ThreadPoolExecutor(1, "forms")

    async def run(
        self, function: Callable[[], Result], size: int, *, has_form: bool = False
    ) -> Result:
        """Run a function that reads text of about `size` characters or tokens, or compiles a
        form."""
        thread = self._short if size <= LONG_TEXT else self._long
        if has_form:
            thread = self._forms
        return await asyncio.get_running_loop().run_in_executor(thread, function)

    def shutdown(self) -> None:
        """Take no more functions. Running ones may end."""
        self._short.shutdown(wait=False)
        self._long.shutdown(wait=False)
        self._forms.shutdown(wait=False)


def takes_long(prompt: object, sampling_params: object) -> bool:
    """Whether a request compiles a form of its answer, or reads images, which takes as long."""
    return getattr(sampling_params, "structured_outputs", None) is not None or has_images(prompt)
