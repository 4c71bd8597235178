"""The text of a streamed answer, for parsers that are written as if the whole text were there.

A parser is a generator that reads with the methods below (`yield from text.peek()`). A method that
needs more text yields; the owner appends text and resumes the generator. The results of a method do
not depend on how the text is split. So a parser that only uses these methods gives the same output
for every split.

A method passes text to a sink as soon as the text is certain. While a parser waits, the unread text
is shorter than the longest literal that it looks for, so the work is linear in the text.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # part of a parser: yields to wait for text, returns T
Sink = Callable[[str], object]

SPACE = re.compile(r"\s*")


class Markers:
    """Literals to look for in a text. No literal may contain another."""

    __slots__ = ("first", "literals", "longest", "pattern", "prefixes")

    def __init__(self, *literals: str):
        self.literals = literals
        self.pattern = re.compile("|".join(map(re.escape, literals)))
        self.first = re.compile("|".join(sorted({re.escape(literal[0]) for literal in literals})))
        self.longest = max(map(len, literals))
        self.prefixes = {literal[:n] for literal in literals for n in range(1, len(literal))}


class TextStream:
    """The text that has arrived and has not been read."""

    __slots__ = ("_has_ended", "_pos", "_text")

    def __init__(self):
        self._text = ""
        self._pos = 0
        self._has_ended = False

    def append(self, text: str) -> None:
        """Add text at the end."""
        assert not self._has_ended, "text after the end of the answer"
        self._text = self._text[self._pos :] + text
        self._pos = 0

    def end(self) -> None:
        """End the text. From now on no method waits."""
        self._has_ended = True

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end of the answer."""
        while self._pos == len(self._text) and not self._has_ended:
            yield
        return self._text[self._pos : self._pos + 1]

    def take(self, sink: Sink) -> None:
        """Read the character that `peek` returned."""
        sink(self._text[self._pos : self._pos + 1])
        self._pos += 1

    def take_while(self, run: re.Pattern[str], sink: Sink) -> Reading[None]:
        """Read characters of one class, given as `[...]*`."""
        while True:
            match = run.match(self._text, self._pos)
            assert match is not None, run
            if match.end() > self._pos:
                self._pos = match.end()
                sink(match[0])
            if self._pos < len(self._text) or self._has_ended:
                return
            yield

    def collect(self, run: re.Pattern[str], sink: Sink) -> Reading[str]:
        """Read characters of one class and return them; pass them to the sink at once."""
        pieces: list[str] = []
        yield from self.take_while(run, pieces.append)
        whole = "".join(pieces)
        sink(whole)
        return whole

    def starts_with(self, literal: str, *, may_be_cut_off: bool = False) -> Reading[bool]:
        """Return whether the literal comes next, without reading it. With `may_be_cut_off`, a part
        of it at the end of the answer is enough."""
        while not self._text.startswith(literal, self._pos):
            rest = self._text[self._pos : self._pos + len(literal)]
            if not literal.startswith(rest):
                return False
            if self._has_ended:
                return may_be_cut_off and rest != ""
            yield
        return True

    def accept(self, literal: str, sink: Sink, *, may_be_cut_off: bool = False) -> Reading[bool]:
        """Read the literal if it comes next, else nothing."""
        found = yield from self.starts_with(literal, may_be_cut_off=may_be_cut_off)
        if found:
            read = self._text[self._pos : self._pos + len(literal)]
            self._pos += len(read)
            sink(read)
        return found

    def take_until(self, markers: Markers, sink: Sink) -> Reading[str | None]:
        """Read up to the first marker and return it without reading it; None if there is none."""
        while True:
            match = markers.pattern.search(self._text, self._pos)
            end = match.start() if match else len(self._text) - self._num_undecided(markers)
            if end > self._pos:
                sink(self._text[self._pos : end])
                self._pos = end
            if match:
                return match[0]
            if self._has_ended:
                return None
            yield

    def _num_undecided(self, markers: Markers) -> int:
        """The number of characters at the end that may be the beginning of a marker."""
        if self._has_ended:
            return 0
        size = len(self._text)
        for match in markers.first.finditer(self._text, max(self._pos, size + 1 - markers.longest)):
            if self._text[match.start() :] in markers.prefixes:
                return size - match.start()
        return 0
