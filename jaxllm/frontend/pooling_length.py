"""How long a prompt of an engine that pools may be, and how its text becomes tokens.

Nothing is generated, so a prompt may fill the context. A longer one is cut, if the request wants
that, as its tokenizer cuts: at the end by default, and never the special tokens around the text.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.pooler_config import Pooling

Side = Literal["left", "right"]

# Of a text that is cut, and of a pair, so many characters are read for each token that may be left.
_CHARS_PER_TOKEN = 64
_SMALL_TEXT = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How texts become tokens; vLLM's names."""

    truncate_prompt_tokens: int | None = None  # -1: as many as fit
    truncation_side: Side = "right"  # which end is cut off
    add_special_tokens: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Self:
        """Read `tokenization_kwargs`."""
        if options is not None and not isinstance(options, Mapping):
            raise refused("tokenization_kwargs", options, "it must be a dict")
        names = [field.name for field in dataclasses.fields(cls)]
        for name in (options or {}).keys() - set(names):
            known = ", ".join(names)
            raise refused("tokenization_kwargs", name, f"it is not supported; only {known} are")
        given = {name: value for name, value in (options or {}).items() if value is not None}
        return cls(**given)

    def __post_init__(self) -> None:
        if self.truncation_side not in ("left", "right"):
            raise refused("truncation_side", self.truncation_side, "give 'left' or 'right'")
        if not isinstance(self.add_special_tokens, bool):
            raise refused("add_special_tokens", self.add_special_tokens, "it must be a bool")


def head_of(tokenizer: Tokenizer | None, name: str, texts: Sequence[str], num: int) -> list[str]:
    """Cut texts behind their first `num` tokens; 0: they stay. `name` is of the number."""
    if num < 0:
        raise refused(name, num, "it must be 0, for whole texts, or more")
    if num == 0:
        return list(texts)
    if tokenizer is None:
        raise refused(name, num, "there is no tokenizer (skip_tokenizer_init=True) to count with")
    most = _most_chars(num)
    return [tokenizer.head_of(text[:most], num) for text in texts]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextPair:
    """Two texts that the model reads together."""

    first: str
    second: str


class PoolingLength:
    """The rule for one prompt."""

    def __init__(self, pooling: Pooling, max_model_len: int, vocab_size: int, options: TextOptions):
        self._pooling = pooling
        self._vocab_size = vocab_size
        self._options = options
        self._plain = PromptLength(max_model_len, num_generated=0)
        asked = options.truncate_prompt_tokens
        truncate = PromptLength.of(max_model_len, asked).truncate
        self._num_kept = max_model_len if truncate == -1 else truncate

    def encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        special = self._options.add_special_tokens
        if self._num_kept is None:
            return self._plain.encode(tokenizer, text, add_special_tokens=special)
        side, most = self._options.truncation_side, _most_chars(self._num_kept)
        text = text[-most:] if side == "left" else text[:most]
        return tokenizer.encode_cut(
            text, None, num=self._num_kept, side=side, add_special_tokens=special
        )[0]

    def fit(self, token_ids: list[int]) -> list[int]:
        if self._num_kept is not None:
            is_left = self._options.truncation_side == "left"
            token_ids = token_ids[-self._num_kept :] if is_left else token_ids[: self._num_kept]
        return self._plain.fit(token_ids)

    def encode_pair(self, tokenizer: Tokenizer, pair: TextPair) -> list[int]:
        """Return the ids of two texts, as the tokenizer joins them. In a model with types of tokens
        an id of the second type is above the vocabulary by its size."""
        num = self._plain.most if self._num_kept is None else self._num_kept
        most = _most_chars(num)
        num_chars = len(pair.first) + len(pair.second)
        if self._num_kept is None and num_chars > most:
            raise ValidationError(
                f"two texts have {num_chars} characters together, of which no more than {most} are "
                f"read to find their tokens; shorten them, or have them cut by "
                "truncate_prompt_tokens=-1",
                parameter="prompt",
                value=num_chars,
            )
        ids, types = tokenizer.encode_cut(
            pair.first[:most],
            pair.second[:most],
            num=self._num_kept,
            side=self._options.truncation_side,
            add_special_tokens=self._options.add_special_tokens,
        )
        if self._pooling.num_token_types > 1:
            size = self._vocab_size
            ids = [token + size * kind for token, kind in zip(ids, types, strict=True)]
        return self._plain.fit(ids)


def _most_chars(num_tokens: int) -> int:
    """How many characters of a text are read for so many tokens."""
    return max(_SMALL_TEXT, _CHARS_PER_TOKEN * num_tokens)
