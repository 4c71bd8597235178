"""Tokenizes long texts no further than needed: lower bounds of their tokens, and their last tokens.

Tokenizing takes a second for each half megabyte, and hundreds of bytes of memory for each byte of
text. So a text that cannot fit is not tokenized to its end. A text of which only the last tokens
are kept is tokenized from a border on, where tokens do not depend on the text before. `Shape` reads
what this needs from the tokenizer's own description, and knows nothing of other kinds.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.frontend.detokenizer import BYTE_LEVEL_ALPHABET

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The text, and whether to add special tokens -> token ids.
Encode = Callable[[str, bool], list[int]]

# Texts of up to this many characters, or this many per allowed token, are tokenized as a whole.
# Prompts that fit are usually no longer.
_SMALL_TEXT = 1 << 16
_CHARS_PER_TOKEN = 8
# Characters per allowed token that are read at most: of a whole text, and of a text whose last
# tokens are wanted. No real prompt has so many.
_MAX_CHARS_PER_TOKEN = 64
_MAX_CHARS_BEFORE_END = 16
_PIECE = 1 << 16
# An upper bound of the tokens that a cut through a text adds. In fact it adds a few: a word becomes
# two, and a run of digits or spaces after the cut may be grouped in another way.
_TOKENS_OF_CUT = 256
# How many characters back a border is searched.
_MAX_WORD = 1 << 12


class TooManyTokens(Exception):
    """A text has more tokens than allowed."""

    def __init__(self, at_least: int):
        self.at_least = at_least


class TooLongToTell(Exception):
    """A text is too long to find out how many tokens it has."""

    def __init__(self, most_chars: int):
        self.most_chars = most_chars


def encode_at_most(
    encode: Encode, shape: "Shape", text: str, most: int, special: bool
) -> list[int]:
    """Return the ids of a text; raise if they are certainly more than `most`. The result may still
    have more ids."""
    if len(text) <= max(_SMALL_TEXT, _CHARS_PER_TOKEN * most):
        return encode(text, special)
    if shape.longest_token_bytes is not None:
        at_least = -(-len(text.encode()) // shape.longest_token_bytes)
        if at_least > most:
            raise TooManyTokens(at_least)
    at_least = 0
    for start in range(0, len(text), _PIECE):
        tokens = encode(text[start : start + _PIECE], False)
        at_least += max(0, len(tokens) - _TOKENS_OF_CUT)
        if at_least > most:
            raise TooManyTokens(at_least)
    _check_is_read(text, _MAX_CHARS_PER_TOKEN * most)
    return encode(text, special)


def encode_end(
    encode: Encode, shape: "Shape", text: str, num: int, most: int, special: bool
) -> list[int]:
    """Return the last `num` ids of a text; raise if this needs more text than `most` tokens
    justify."""
    most_chars = _MAX_CHARS_BEFORE_END * most
    size = max(_SMALL_TEXT, _CHARS_PER_TOKEN * num)
    while size < len(text):
        start = None if shape.borders is None else shape.borders.before(text, len(text) - size)
        if start is None:
            break
        ids = encode(text[start:], special)
        if len(ids) - (shape.num_special if special else 0) >= num:
            return ids[-num:]
        _check_is_read(text[start:], most_chars)
        size *= 4
    _check_is_read(text, most_chars)
    return encode(text, special)[-num:]


def _check_is_read(text: str, most_chars: int) -> None:
    most_chars = max(most_chars, 4 * _SMALL_TEXT)
    if len(text) > most_chars:
        raise TooLongToTell(most_chars)


class Shape(NamedTuple):
    """What is known of a tokenizer from its description."""

    # No token stands for more bytes of the text than this. None: not known.
    longest_token_bytes: int | None = None
    borders: "Borders | None" = None
    num_special: int = 0  # how many special tokens are added to a text

    @classmethod
    def of(cls, hf: "PreTrainedTokenizerBase") -> "Shape":
        is_plain = hf.is_fast and type(hf).__module__.startswith("transformers.")
        backend: Any = hf.backend_tokenizer if is_plain else None  # pyright: ignore[reportAttributeAccessIssue]
        if backend is None or type(backend.model).__name__ != "BPE":
            return cls()
        model = backend.model
        if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
            return cls()
        added = list(backend.get_added_tokens_decoder().values())
        vocabulary = backend.get_vocab(with_added_tokens=False)
        normalizer, splitter = _described(backend.normalizer), _described(backend.pre_tokenizer)
        num_special = backend.num_special_tokens_to_add(False)
        contents = tuple(token.content for token in added)
        if (right := _after_words(splitter)) and normalizer in ([], [{"type": "NFC"}]):
            longest = None
            if not normalizer and BYTE_LEVEL_ALPHABET.keys() <= vocabulary.keys():
                if not any(token.lstrip or token.rstrip for token in added):
                    longest = max(
                        *map(len, vocabulary),  # a character for each byte
                        *(len(content.encode()) for content in contents),
                    )
            return cls(longest, Borders(f"(?<=[{_LETTERS}])[{right}]", 0, contents), num_special)
        offset = _spaces_are_parts_of_tokens(normalizer, splitter)
        if offset is None or model.ignore_merges or "▁" not in vocabulary:
            return cls()
        if any(_SPACE_WITHIN.search(token) for token in vocabulary):
            return cls()
        pattern = f"(?<=[{_LETTERS}]) (?=[{_LETTERS}])"
        return cls(None, Borders(pattern, offset, contents), num_special)


class Borders:
    """Places in a text where a token begins and the tokens do not depend on the text before."""

    def __init__(self, pattern: str, offset: int, added_tokens: tuple[str, ...]):
        """A border is `offset` characters after the start of a match of the pattern, unless an
        added token is near: a tokenizer splits off added tokens before anything else."""
        self._pattern = re.compile(pattern)
        self._offset = offset
        self._added_tokens = added_tokens
        self._reach = max(map(len, added_tokens), default=0) + 1

    def before(self, text: str, end: int) -> int | None:
        """The last border before `end`; None if there is none within _MAX_WORD characters."""
        first = max(1, end - _MAX_WORD)
        matches = list(self._pattern.finditer(text, first, end))
        for match in reversed(matches):
            if not self._is_in_added_token(text, match.start()):
                return match.start() + self._offset
        return None

    def _is_in_added_token(self, text: str, place: int) -> bool:
        """Whether the text of an added token covers or touches a place."""
        left = text[max(0, place - self._reach) : place]
        right = text[place : place + self._offset + self._reach]
        for kind in (None, "NFC"):
            if kind is not None:
                left, right = unicodedata.normalize(kind, left), unicodedata.normalize(kind, right)
            both, border = left + right, len(left)
            for token in self._added_tokens:
                start = both.find(token)
                while start >= 0:
                    if start <= border + self._offset and start + len(token) >= border:
                        return True
                    start = both.find(token, start + 1)
        return False


# Characters that are letters in every version of Unicode that a tokenizer may use.
_LETTERS = "A-Za-zÀ-ÖØ-öΑ-ΡΣ-Ωα-ωА-яא-תء-غअ-हก-ฮぁ-ゖァ-ヺ一-龥가-힣"
_WHITESPACE, _PUNCTUATION = r" \n", r",.;:!?，。！？；：、"

# Alternatives of the expressions that split texts for byte-level tokenizers. No match of them
# contains a letter followed by whitespace or such punctuation, and none looks behind. So a match
# ends wherever these follow a letter, and another begins there if an alternative matches them.
_FOR_WHITESPACE = {r"\s+", r"\s"}
_FOR_PUNCTUATION = {
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"[^\s\p{L}\p{N}]+",
}
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_FOR_OTHERS = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTION),
    *(r" ?\p{L}+", r" ?_*\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+"),
    *(f"[^\\r\\n\\p{{L}}\\p{{N}}]?{_UPPER}*{_LOWER}+{end}" for end in ("", f"{_CONTRACTION}?")),
    *(f"[^\\r\\n\\p{{L}}\\p{{N}}]?{_UPPER}+{_LOWER}*{end}" for end in ("", f"{_CONTRACTION}?")),
    *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+"),
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"[ \t]+(?!\S)", r"\n[ \t]*"),
}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACE_WITHIN = re.compile("[^▁]▁")


def _after_words(splitter: list[dict[str, Any]]) -> str:
    """The characters that always begin a piece after a letter, for a class of an expression; ""
    if none are known."""
    if [step["type"] for step in splitter[-1:]] != ["ByteLevel"]:
        return ""
    right = ""
    for step in splitter:
        match step:
            case {"type": "Digits"}:
                continue
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": uses_regex}:
                pattern = _GPT2 if uses_regex else ""
            case {
                "type": "Split",
                "pattern": {"Regex": str(pattern)},
                "behavior": "Isolated",
                "invert": False,
            }:
                pass
            case _:
                return ""
        alternatives = set(_alternatives(pattern)) - {""}
        if not alternatives <= _FOR_WHITESPACE | _FOR_PUNCTUATION | _FOR_OTHERS:
            return ""
        if alternatives & _FOR_WHITESPACE:
            right = _WHITESPACE + (_PUNCTUATION if alternatives & _FOR_PUNCTUATION else "")
    return right


def _alternatives(pattern: str) -> Iterator[str]:
    """Split an expression at the bars outside of parentheses."""
    depth, start = 0, 0
    for place, char in enumerate(pattern):
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            yield pattern[start:place]
            start = place + 1
    yield pattern[start:]


def _spaces_are_parts_of_tokens(
    normalizer: list[dict[str, Any]], splitter: list[dict[str, Any]]
) -> int | None:
    """Tokenizers like SentencePiece write a space as '▁' and join it with the next word. Return 1
    if the tokenizer also puts one before the text, so that a piece must begin after a space, else
    0. Return None for another kind of tokenizer."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    puts_one = {"type": "Prepend", "prepend": "▁"}
    match splitter:
        case []:
            starts = {1: [puts_one, replace], 0: [replace]}
            return next((offset for offset, steps in starts.items() if normalizer == steps), None)
        case [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}]:
            return None if normalizer else int(scheme != "never")
        case _:
            return None


def _described(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as in tokenizer.json."""
    if part is None:
        return []
    step: Mapping[str, Any] = json.loads(part.__getstate__())
    if step["type"] != "Sequence":
        return [dict(step)]
    return list(step.get("normalizers") or step.get("pretokenizers") or [])
