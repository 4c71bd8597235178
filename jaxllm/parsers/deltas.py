"""Deltas: the pieces of a streamed answer, and the whole answer that they add up to."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """The next piece of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The beginning of a tool call. Its arguments follow, in deltas of the same index."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next piece of a call's arguments, which are JSON text."""

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | ToolCallDelta | ArgumentsDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call. The arguments are JSON text, incomplete if the call was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A whole answer."""

    reasoning: str
    content: str
    tool_calls: list[ToolCall]


def add_up(deltas: Iterable[Delta]) -> ParsedAnswer:
    """Join deltas to the whole answer."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCallDelta] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case ReasoningDelta():
                reasoning.append(delta.text)
            case ContentDelta():
                content.append(delta.text)
            case ToolCallDelta():
                assert delta.index == len(calls), delta
                calls.append(delta)
                arguments.append([])
            case ArgumentsDelta():
                arguments[delta.index].append(delta.text)
    tool_calls = [
        ToolCall(call.id, call.name, "".join(texts))
        for call, texts in zip(calls, arguments, strict=True)
    ]
    return ParsedAnswer("".join(reasoning), "".join(content), tool_calls)


class DeltaWriter:
    """Collects deltas until they are taken. Consecutive texts of one kind become one delta."""

    __slots__ = ("_deltas", "_kind", "_texts")

    def __init__(self):
        self._deltas: list[Delta] = []
        self._kind: type[ReasoningDelta | ContentDelta] | int | None = None
        self._texts: list[str] = []

    def reasoning(self, text: str) -> None:
        self._add(ReasoningDelta, text)

    def content(self, text: str) -> None:
        self._add(ContentDelta, text)

    def arguments(self, index: int, text: str) -> None:
        self._add(index, text)

    def tool_call(self, call: ToolCallDelta) -> None:
        self._close()
        self._deltas.append(call)

    def take(self) -> list[Delta]:
        """Return the deltas since the last call."""
        self._close()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _add(self, kind: type[ReasoningDelta | ContentDelta] | int, text: str) -> None:
        if not text:
            return
        if kind != self._kind:
            self._close()
            self._kind = kind
        self._texts.append(text)

    def _close(self) -> None:
        if not self._texts:
            return
        text = "".join(self._texts)
        self._texts.clear()
        if isinstance(self._kind, int):
            self._deltas.append(ArgumentsDelta(self._kind, text))
        elif self._kind is not None:
            self._deltas.append(self._kind(text))
