"""The compiled grammars of an engine: a bounded number of them, and a copy for each request.

Threads compile, since one grammar may take a tenth of a second and steps must go on. Equal grammars
compile once: the samples of one prompt share a grammar, and so do most requests of a program.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from jaxllm.structured_output.compile import compile_grammar
from jaxllm.structured_output.vocabulary import Vocabulary

# What is kept after its requests have ended. What a grammar takes in memory grows with its text.
_MAX_KEPT = 256
_MAX_KEPT_CHARS = 8 << 20
_THREADS = 2
# From this number of rows on, to wake threads takes less time than they save.
_MANY_ROWS = 8


class CompiledGrammars:
    """Compiles grammars, and keeps those that were used last."""

    def __init__(self, load: Callable[[], Vocabulary]):
        """`load` may take a second; the first grammar waits for it."""
        self._load = load
        self._pool = ThreadPoolExecutor(_THREADS, "grammar")
        self._kept: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # the latest used is last
        self._num_chars = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, grammar: str) -> Future[LLMatcher]:
        """Return the matcher at the beginning of a grammar, now or soon. Copy it, do not use it.
        The future has an exception if the grammar cannot be compiled."""
        future = self._kept.get(grammar)
        if future is not None:
            self._kept.move_to_end(grammar)
            return future
        self._kept[grammar] = future = self._pool.submit(self._compile, grammar)
        self._num_chars += len(grammar)
        while len(self._kept) > 1 and (
            len(self._kept) > _MAX_KEPT or self._num_chars > _MAX_KEPT_CHARS
        ):
            oldest, _ = self._kept.popitem(last=False)
            self._num_chars -= len(oldest)
        return future

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        return compile_grammar(self._load(), grammar)


class Masks:
    """Computes the masks of a step's rows, in threads if they are many."""

    def __init__(self) -> None:
        self._threads: LLExecutor | None = None

    def fill(self, matchers: list[tuple[LLMatcher, int]], masks: np.ndarray) -> None:
        """Fill rows of i32 [rows, words] with the tokens that the matchers, given with their rows,
        take next. If a matcher fails, it says so itself."""
        if len(matchers) < _MANY_ROWS:
            for matcher, row in matchers:
                fill_next_token_bitmask(matcher, masks, row)
            return
        if self._threads is None:
            self._threads = LLExecutor()
        fill_next_token_bitmask_par(self._threads, matchers, masks)
