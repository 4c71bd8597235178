"""One answer's text, taken apart: reasoning first, then content and calls of tools.

Stands between the engine's text deltas and the chat message. The parser of reasoning gets the text,
the parser of tool calls what that one calls content; either may be missing.
"""

from collections.abc import Sequence

from jaxllm.parsers.deltas import ContentDelta, Delta, ParsedAnswer, add_up
from jaxllm.parsers.reasoning.counter import ReasoningCounter
from jaxllm.parsers.stream_parser import StreamParser


class AnswerParser:
    """Parses one answer, as it streams or whole."""

    def __init__(
        self,
        reasoning: StreamParser | None = None,
        tools: StreamParser | None = None,
        counter: ReasoningCounter | None = None,
    ):
        self._reasoning = reasoning
        self._tools = tools
        self._counter = counter

    @property
    def num_reasoning_tokens(self) -> int | None:
        """How many of the tokens so far are reasoning; None where nobody counts them."""
        return None if self._counter is None else self._counter.num_tokens

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        """Take the next piece of the answer, and the tokens that it is from, of which some may show
        in a later piece only; return what has become certain."""
        if self._counter:
            self._counter.feed(token_ids)
        if self._reasoning:
            return self._feed_tools(self._reasoning.feed(text))
        return self._feed_tools([ContentDelta(text)] if text else [])

    def finish(self) -> list[Delta]:
        """The answer has ended: return what was held back."""
        if self._counter:
            self._counter.finish()
        deltas = self._feed_tools(self._reasoning.finish()) if self._reasoning else []
        return deltas + (self._tools.finish() if self._tools else [])

    def parse(self, text: str) -> ParsedAnswer:
        """A whole answer at once."""
        return add_up([*self.feed(text), *self.finish()])

    def _feed_tools(self, deltas: list[Delta]) -> list[Delta]:
        if self._tools is None:
            return deltas
        parsed: list[Delta] = []
        for delta in deltas:
            parsed += self._tools.feed(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return parsed
