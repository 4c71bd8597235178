"""What an answer is made of: pieces as they stream, and the whole that they add up to."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A call of a tool begins. Its arguments follow, in deltas of the same index."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments: a piece of the JSON text."""

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | ToolCallDelta | ArgumentsDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call. The arguments are JSON text; of a call that was cut off, as far as it came."""

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
    """The answer that was streamed in these deltas."""
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
    """Collects deltas between two visits of the reader, texts of one kind joined to one delta."""

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
        """What has been written since the last time."""
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
