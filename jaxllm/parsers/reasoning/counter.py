"""How many tokens of an answer are reasoning."""

from collections.abc import Callable, Sequence

from jaxllm.parsers.deltas import Delta, ReasoningDelta
from jaxllm.parsers.stream_parser import StreamParser


class ReasoningCounter:
    """Counts the tokens up to the last one that shows as reasoning: an opening tag among them, the
    closing one not. Every token is parsed alone, so it does not matter in which pieces they come.
    """

    def __init__(self, parser: StreamParser, text_of: Callable[[int], str]):
        """`parser` is one for the answer's reasoning, of which this is the only reader; `text_of`
        gives the text of a token alone."""
        self._parser = parser
        self._text_of = text_of
        self._num_seen = 0
        self._is_over = False
        self.num_tokens = 0

    def feed(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the answer."""
        for token_id in token_ids:
            if self._is_over:
                return
            self._num_seen += 1
            self._take(self._parser.feed(self._text_of(token_id)))

    def finish(self) -> None:
        """The answer has ended."""
        self._take(self._parser.finish())

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                self.num_tokens = self._num_seen
            else:
                self._is_over = True
