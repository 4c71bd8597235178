"""Harmony, in which gpt-oss writes: an answer is several messages, each with a header.

    <|channel|>analysis<|message|>The user wants the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
    {"city": "Paris"}<|call|>

There are no line breaks between these parts. The prompt ends with the first `<|start|>assistant`,
so that an answer begins inside a header. A recipient stands after the channel, or before it. An
answer ends with `<|call|>` or `<|return|>`, which are stop tokens and seldom in its text.
"""

import re
from typing import NamedTuple

from jaxllm.parsers.text_stream import Markers, Reading, Sink, TextStream

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
NEXT = f"{START}assistant"  # how the next message of an answer begins
END, CALL, RETURN = ENDS = ("<|end|>", "<|call|>", "<|return|>")  # of a message
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"

HEADERS = Markers(START, CHANNEL)
BODY_ENDS = Markers(*ENDS, START)
RECIPIENT = "to="
FUNCTIONS = "functions."

_HEADER_ENDS = Markers(MESSAGE, *ENDS, START)
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_TO = r"(\s*to=[^\s<]*)?"
_BEGINNING = re.compile(
    rf"({re.escape(START)})?\w*{_TO}({re.escape(CHANNEL)}\w*)?{_TO}\s*({re.escape(CONSTRAIN)})?\w*"
)


class Header(NamedTuple):
    """Whom a message is for."""

    channel: str
    recipient: str  # "" if the message is for the user

    @property
    def function(self) -> str:
        """The function that the message calls; "" if it calls none."""
        is_call = self.recipient.startswith(FUNCTIONS)
        return self.recipient.removeprefix(FUNCTIONS) if is_call else ""

    @classmethod
    def of(cls, text: str) -> "Header":
        channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
        return cls(channel[1] if channel else "", recipient[1] if recipient else "")


def read_header(text: TextStream, sink: Sink) -> Reading[Header | None]:
    """Read a header, with `<|message|>`. None if something else follows, or the answer ends."""
    pieces: list[str] = []

    def both(piece: str) -> None:
        pieces.append(piece)
        sink(piece)

    yield from text.accept(START, both)
    yield from text.take_until(_HEADER_ENDS, both)
    is_whole = yield from text.accept(MESSAGE, both)
    return Header.of("".join(pieces)) if is_whole else None


def begins_header(text: str) -> bool:
    """Whether this may be a header that the end of the answer cuts off."""
    return _BEGINNING.fullmatch(text) is not None


def read_end(text: TextStream, sink: Sink) -> Reading[None]:
    """Read what ends a message, if it comes next."""
    for end in ENDS:
        if (yield from text.accept(end, sink)):
            return
