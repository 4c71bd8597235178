"""Which of an answer's tokens are of its text, where a parser takes the answer apart.

A parser gets text and returns parts of it, some later than others, and says nothing of tokens. So
it gets the answer token by token, and the text of a part is found among the tokens that no part has
had yet: what goes on goes on where it was, and what begins anew, behind a mark or a call, is the
last that they have of it, since marks come before.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxllm.frontend.detokenizer import IncrementalDetokenizer
from jaxllm.openai.logprobs import ChatTokenLogprob


class Given(NamedTuple):
    """What a parser is given at once."""

    text: str
    token_ids: list[int]


class _Token:
    """One or several tokens with their text: those of a character's bytes have it together."""

    __slots__ = ("ids", "is_told", "logprobs", "text")

    def __init__(self):
        self.text = ""
        self.ids: list[int] = []
        self.logprobs: list[ChatTokenLogprob] = []
        self.is_told = False


class TextLogprobs:
    """Divides one answer among its tokens."""

    def __init__(self, stream: IncrementalDetokenizer):
        """`stream` makes the answer's text of its tokens."""
        self._stream = stream
        self._next = _Token()  # whose text is not known yet
        self._made: deque[_Token] = deque()  # that are not given yet
        self._left = ""  # text that is not given yet
        self._open: list[_Token] = []  # given, and of no part so far
        self._used = 0  # so many characters of the first of these are of a part
        self._goes_on = False

    def give(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[ChatTokenLogprob]
    ) -> Iterator[Given]:
        """Take the next text of an answer and its tokens, of which some may have their text later.
        Yield both for the parser; what it makes of each must be told before the next."""
        self._left += text
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            one = self._next
            one.ids.append(token_id)
            one.logprobs.append(logprob)
            one.text = self._stream.append([token_id])
            if one.text:
                self._made.append(one)
                self._next = _Token()
            elif _is_whole(logprob):  # it is hidden
                one.logprobs.pop()
        at = 0
        while self._made and self._left.startswith(self._made[0].text, at):
            one = self._made.popleft()
            at += len(one.text)
            self._open.append(one)
            yield Given(one.text, one.ids)
        self._left = self._left[at:]

    def rest(self) -> Given:
        """What is left at the end of the answer: the head of what a stop string has cut."""
        ids = [token_id for one in (*self._made, self._next) for token_id in one.ids]
        for one in self._made if self._left else ():
            self._open.append(one)
        text, self._left, self._made, self._next = self._left, "", deque(), _Token()
        return Given(text, ids)

    def begin(self) -> None:
        """Note that a part begins."""
        self._goes_on = False

    def tell(self, text: str, *, shows: bool) -> list[ChatTokenLogprob]:
        """Find the next text of a part; return the logprobs of its tokens, if it shows them."""
        if not text:
            return []
        window = "".join(one.text for one in self._open)[self._used :]
        at, length = 0, len(text)
        if not (self._goes_on and window.startswith(text)):
            at = window.rfind(text)
        if at < 0:  # the parser has changed it
            at, length = 0, len(window)
        self._goes_on = True
        start = self._used + at
        end = start + length
        found: list[ChatTokenLogprob] = []
        position, kept = 0, self._open
        for place, one in enumerate(self._open):
            first, position = position, position + len(one.text)
            if first >= end:
                break
            if shows and position > start and not one.is_told:
                found += one.logprobs
                one.is_told = True
            if position <= end:
                kept, self._used = self._open[place + 1 :], end - position
            else:
                kept, self._used = self._open[place:], end - first
        self._open = kept
        return found


def _is_whole(logprob: ChatTokenLogprob) -> bool:
    """Whether a token is no part of a character."""
    try:
        bytes(logprob.bytes).decode()
    except UnicodeDecodeError:
        return False
    return True
