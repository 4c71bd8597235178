"""Counts the reasoning tokens of an answer."""

from collections.abc import Callable, Sequence

from jaxllm.parsers.deltas import Delta, ReasoningDelta
from jaxllm.parsers.stream_parser import StreamParser


class ReasoningCounter:
    """Counts the tokens up to the last one with reasoning text. It includes an opening tag, and
    not the closing one. Tokens are parsed one by one, so the count does not depend on how the
    answer is split into steps.
    """

    def __init__(self, parser: StreamParser, text_of: Callable[[int], str]):
        """`parser` is a reasoning parser that nothing else reads; `text_of` returns the text of a
        single token."""
        self._parser = parser
        self._text_of = text_of
        self._num_seen = 0
        self._is_over = False
        self.num_tokens = 0

    def feed(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the answer."""
        for token_id in token_ids:
            if self._is_over:
                return
            self._num_seen += 1
            self._take(self._parser.feed(self._text_of(token_id)))

    def finish(self) -> None:
        """End the answer."""
        self._take(self._parser.finish())

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                self.num_tokens = self._num_seen
            else:
                self._is_over = True
