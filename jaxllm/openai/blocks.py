"""A chat message as blocks, in the order in which the model wrote them.

A chat message has one reasoning, one content and a list of calls. Other protocols keep the order:
each reasoning, text and call is a block of its own, which begins, grows and ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxllm.openai.message import ChatDelta

Kind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True)
class Begin:
    """A block begins. A call has an id and a name."""

    kind: Kind
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class More:
    """The next piece of the block's text; of a call, of its arguments, which are JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The block ends."""


Piece = Begin | More | End


class Blocks:
    """Makes the pieces of blocks from the deltas of a message.

    A text begins with its first character that is no space: what is between reasoning and calls is
    no text.
    """

    def __init__(self):
        self._open: Kind | None = None
        self._space = ""
        self.has_calls = False

    def feed(self, deltas: Iterable[ChatDelta]) -> list[Piece]:
        pieces: list[Piece] = []
        for delta in deltas:
            if isinstance(delta.reasoning, str):
                self._go_on(pieces, "reasoning", delta.reasoning)
            if isinstance(delta.content, str):
                self._text(pieces, delta.content)
            for call in delta.tool_calls or ():
                if isinstance(call.id, str) and isinstance(call.function.name, str):
                    self.has_calls = True
                    self._end(pieces)
                    self._open = "call"
                    pieces.append(Begin("call", call.id, call.function.name))
                if call.function.arguments:
                    pieces.append(More(call.function.arguments))
        return pieces

    def finish(self) -> list[Piece]:
        """End the last block."""
        pieces: list[Piece] = []
        self._end(pieces)
        return pieces

    def _text(self, pieces: list[Piece], text: str) -> None:
        if self._open != "text":
            text = self._space + text
            if not text.strip():
                self._space = text
                return
        self._go_on(pieces, "text", text)

    def _go_on(self, pieces: list[Piece], kind: Kind, text: str) -> None:
        if self._open != kind:
            self._end(pieces)
            self._open = kind
            pieces.append(Begin(kind))
        pieces.append(More(text))

    def _end(self, pieces: list[Piece]) -> None:
        self._space = ""
        if self._open is not None:
            self._open = None
            pieces.append(End())
