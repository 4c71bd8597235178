"""Ids to text, token by token, for answers that are still growing.

In nearly all language models a token *is* a string of bytes (byte-level BPE, or SentencePiece
with byte fallback), and the text of an answer is the UTF-8 decoding of those bytes. So an
answer's state is the few bytes of an unfinished character, and a token costs one table look-up
and one decode of its own bytes, however long the answer is. The tables come from the tokenizer's
own description of its decoder. If that decoder works in another way, or is Python code, the
tokenizer itself decodes a short window of tokens instead.

In both ways the texts that `append` returns add up to what `tokenizer.decode` makes of all ids,
except for an unfinished character at the end: it is withheld until it is whole or known to be
invalid. There is one deliberate difference. If a run of byte-fallback tokens is not valid as a
whole, `tokenizer.decode` replaces all of it, including characters that a stream has already shown.
Here only the invalid bytes become U+FFFD.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INVALID = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer(Protocol):
    """The text of one answer as it grows."""

    def append(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete, possibly ''."""
        ...


class Detokenizer:
    """The texts of one tokenizer's tokens; all answers share it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._hf = tokenizer
        # The Rust tokenizer; None if the tokenizer is written in Python.
        self._backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None  # pyright: ignore[reportAttributeAccessIssue]
        self._added = frozenset(tokenizer.added_tokens_decoder)
        if self._backend is None:
            special = tokenizer.all_special_ids
        else:
            added = self._backend.get_added_tokens_decoder()
            special = [id for id, token in added.items() if token.special]
        self._special = frozenset(special)
        self._num_ids = len(tokenizer)
        self._token_texts: dict[int, str] = {}

        self._rules = None if self._backend is None else _parse_decoder(self._backend)
        if self._rules is not None:
            self._bytes = _TokenBytes(self._bytes_of)
            self._visible_bytes = _TokenBytes(
                lambda id: b"" if id in self._special else self._bytes[id]
            )

    def stream(
        self,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> IncrementalDetokenizer:
        """Begin an answer. Its text continues the prompt's: the first token keeps its leading
        space, and may complete a character that the prompt left unfinished."""
        if self._rules is not None:
            table = self._visible_bytes if skip_special_tokens else self._bytes
            return _ByteStream(self._rules, table, prompt_token_ids)
        hidden = self._special if skip_special_tokens else frozenset()
        return _WindowStream(
            self._decode,
            lambda id: id not in hidden and id < self._num_ids,
            frozenset() if spaces_between_special_tokens else self._added,
            prompt_token_ids,
        )

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, as logprobs show it; special tokens have a text too."""
        text = self._token_texts.get(token_id)
        if text is None:
            if self._rules is not None:
                text = self._bytes[token_id].decode("utf-8", "replace")
            else:
                text = self._decode([token_id]) if token_id < self._num_ids else ""
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token alone, which may be a part of a character."""
        if self._rules is not None:
            return self._bytes[token_id]
        return self.token_text(token_id).encode()

    def _bytes_of(self, token_id: int) -> bytes:
        assert self._rules is not None
        token = self._backend.id_to_token(token_id)
        # The model's output head may have more rows than the tokenizer has tokens.
        return b"" if token is None else self._rules.to_bytes(token)

    def _decode(self, token_ids: list[int]) -> str:
        """The whole text of some tokens, without clean-up of spaces, which would change text that
        has already been shown."""
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=False)
        text = self._hf.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), type(text)
        return text


class _TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, computed at first use."""

    def __init__(self, compute: Callable[[int], bytes]):
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = data = self._compute(token_id)
        return data


class _ByteStream:
    """An answer whose tokens are bytes."""

    __slots__ = ("_bytes_of", "_errors", "_pending", "_strip")

    def __init__(self, rules: "_Rules", bytes_of: _TokenBytes, prompt_token_ids: Sequence[int]):
        self._bytes_of = bytes_of
        self._errors = rules.utf8_errors
        self._pending = b""  # bytes of an unfinished character: at most 3
        self._strip = ""
        # A character has at most 4 bytes, so earlier tokens of the prompt cannot matter.
        self.append(prompt_token_ids[-4:])
        if rules.strip and not any(bytes_of[token] for token in reversed(prompt_token_ids)):
            self._strip = rules.strip  # removed once, from the head of the text

    def append(self, token_ids: Sequence[int]) -> str:
        # One join: repeated addition would copy the whole text for each token.
        data = self._pending + b"".join([self._bytes_of[token] for token in token_ids])
        text, num_decoded = codecs.utf_8_decode(data, self._errors, False)
        self._pending = data[num_decoded:]
        if self._strip and text:
            text, self._strip = text.removeprefix(self._strip), ""
        return text


# How many tokens the window keeps, and how long it may grow. The text of a token depends on at most
# a few tokens before it, and an unfinished character is at most 4 tokens long.
_WINDOW = 8
_MAX_WINDOW = 16
_HARD_MAX_WINDOW = 64


class _WindowStream:
    """An answer whose text the tokenizer decodes, for the last few tokens at a time."""

    __slots__ = ("_decode", "_is_shown", "_num_withheld", "_spaceless", "_text", "_window")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_shown: Callable[[int], bool],
        spaceless: frozenset[int],
        prompt_token_ids: Sequence[int],
    ):
        self._decode = decode
        self._is_shown = is_shown
        self._spaceless = spaceless  # no space between two of these
        self._window = [token for token in prompt_token_ids[-_MAX_WINDOW:] if is_shown(token)]
        self._text = decode(self._window) if self._window else ""
        self._num_withheld = _num_withheld(self._text)  # characters at the end of the text

    def append(self, token_ids: Sequence[int]) -> str:
        tokens = [token for token in token_ids if self._is_shown(token)]
        if self._spaceless:
            return "".join(map(self._append_spaceless, tokens))
        return self._append(tokens)

    def _append_spaceless(self, token: int) -> str:
        follows = bool(self._window) and self._window[-1] in self._spaceless
        text = self._append([token])
        return text.removeprefix(" ") if follows and token in self._spaceless else text

    def _append(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        self._window += tokens
        text = self._decode(self._window)
        start = len(self._text) - self._num_withheld
        self._num_withheld = _num_withheld(text)
        end = max(start, len(text) - self._num_withheld)
        self._num_withheld = len(text) - end
        self._text = text
        if len(self._window) > _MAX_WINDOW:
            self._shorten()
        return text[start:end]

    def _shorten(self) -> None:
        window = self._window[-_WINDOW:]
        text = self._decode(window)
        # The text of a window that begins inside an answer may lose a space at its head, not more.
        # A window of spaces alone would lose them all, so keep it until it has other text.
        is_tail = bool(text.strip()) and self._text.endswith(text)
        if is_tail or len(self._window) > _HARD_MAX_WINDOW:
            self._window, self._text = window, text


def _num_withheld(text: str) -> int:
    """How many characters at the end may still change. An unfinished character shows as one U+FFFD,
    or as one for each of its bytes, of which there are at most 3."""
    tail = text[-3:]
    return len(tail) - len(tail.rstrip(_INVALID))


class _Rules(NamedTuple):
    """How a decoder that works by bytes makes text of tokens."""

    to_bytes: Callable[[str], bytes]
    utf8_errors: str
    strip: str  # removed once from the head of the whole text


def _parse_decoder(backend: Any) -> _Rules | None:
    """Read the decoder's description; None if it does not work by bytes."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    types = [step["type"] for step in steps]
    if types in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return _Rules(_byte_level, "replace", "")

    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    strip = ""
    if [step["type"] for step in steps] == ["ByteFallback", "Fuse", "Strip"]:
        step = steps.pop()
        if step["start"] > 1 or step["stop"]:
            return None
        strip = step["content"] * step["start"]
    if [step["type"] for step in steps] not in (["ByteFallback", "Fuse"], ["ByteFallback"]):
        return None

    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.encode()

    return _Rules(to_bytes, _EACH_BYTE, strip)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "jaxllm.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError), error
    return _INVALID * (error.end - error.start), error.end


# Byte fallback shows each invalid byte; Python's "replace" would join those of one character.
codecs.register_error(_EACH_BYTE, _replace_each_byte)


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that GPT-2 gave to the 256 bytes: printable ones stand for themselves, the
    others follow from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    printable |= set(range(ord("®"), ord("ÿ") + 1))
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_LEVEL_ALPHABET[char] for char in token)
    except KeyError:  # an added token, whose name is its text
        return token.encode()
