"""Splits one answer's text: reasoning first, then content and tool calls.

It is between the engine's text deltas and the chat message. The reasoning parser reads the text;
the tool parser reads what the reasoning parser returns as content. Either may be absent.
"""

from collections.abc import Sequence

from jaxllm.parsers.deltas import ContentDelta, Delta, ParsedAnswer, add_up
from jaxllm.parsers.reasoning.counter import ReasoningCounter
from jaxllm.parsers.stream_parser import StreamParser


class AnswerParser:
    """Parses one answer, streamed or whole."""

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
        """The number of reasoning tokens so far; None if they are not counted."""
        return None if self._counter is None else self._counter.num_tokens

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        """Take the next piece of the answer and its tokens; return the deltas that are certain now.

        The text of some tokens may be in a later piece.
        """
        if self._counter:
            self._counter.feed(token_ids)
        if self._reasoning:
            return self._feed_tools(self._reasoning.feed(text))
        return self._feed_tools([ContentDelta(text)] if text else [])

    def finish(self) -> list[Delta]:
        """End the answer; return the deltas that were held back."""
        if self._counter:
            self._counter.finish()
        deltas = self._feed_tools(self._reasoning.finish()) if self._reasoning else []
        return deltas + (self._tools.finish() if self._tools else [])

    def parse(self, text: str) -> ParsedAnswer:
        """Parse a whole answer at once."""
        return add_up([*self.feed(text), *self.finish()])

    def _feed_tools(self, deltas: list[Delta]) -> list[Delta]:
        if self._tools is None:
            return deltas
        parsed: list[Delta] = []
        for delta in deltas:
            parsed += self._tools.feed(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return parsed
