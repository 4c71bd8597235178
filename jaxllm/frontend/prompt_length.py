"""How long a prompt may be. A longer prompt is truncated if the request wants that, else refused.

Text that is refused or cut off is not tokenized: otherwise any client could keep a processor busy.
"""

import numbers
from dataclasses import dataclass
from typing import Protocol

from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.long_text import TooLongToTell, TooManyTokens


class Encoder(Protocol):
    """The part of a tokenizer that encodes texts of any length."""

    def encode_at_most(self, text: str, most: int, *, add_special_tokens: bool) -> list[int]: ...

    def encode_end(
        self, text: str, num: int, most: int, *, add_special_tokens: bool
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class PromptLength:
    """The rule for one prompt, which must leave room for the tokens that are generated at least."""

    max_model_len: int
    truncate: int | None = None  # keep so many last tokens; -1 keeps as many as fit
    num_generated: int = 1

    @classmethod
    def of(cls, max_model_len: int, truncate: object) -> "PromptLength":
        """The rule that a request asks for with truncate_prompt_tokens."""
        if truncate is None:
            return cls(max_model_len)
        if isinstance(truncate, bool) or not isinstance(truncate, numbers.Integral):
            raise refused("truncate_prompt_tokens", truncate, "it must be an integer")
        if truncate != -1 and not 1 <= int(truncate) <= max_model_len:
            raise refused(
                "truncate_prompt_tokens",
                truncate,
                f"it must be -1 (as many as fit) or between 1 and max_model_len={max_model_len}",
            )
        return cls(max_model_len, int(truncate))

    def encode(
        self, tokenizer: Encoder, text: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the ids of a prompt, truncated if wanted; raise ValidationError if it is too
        long."""
        most = self.most
        try:
            if self._num_kept is None:
                ids = tokenizer.encode_at_most(text, most, add_special_tokens=add_special_tokens)
            else:
                ids = tokenizer.encode_end(
                    text, self._num_kept, most, add_special_tokens=add_special_tokens
                )
        except TooManyTokens as error:
            raise self._too_long("at least ", error.at_least) from None
        except TooLongToTell as error:
            raise ValidationError(
                f"the prompt has {len(text)} characters, of which no more than {error.most_chars} "
                f"are read to find its tokens, with max_model_len={self.max_model_len}, the "
                "maximum context length; shorten it",
                parameter="prompt",
                value=len(text),
            ) from None
        return self.fit(ids)

    def fit(self, token_ids: list[int]) -> list[int]:
        """Return a prompt of ids, truncated if wanted; raise ValidationError if it is too long."""
        if self._num_kept is not None:
            token_ids = token_ids[-self._num_kept :]
        if len(token_ids) > self.most:
            raise self._too_long("", len(token_ids))
        return token_ids

    @property
    def most(self) -> int:
        """The most tokens of a prompt."""
        return self.max_model_len - self.num_generated

    @property
    def _num_kept(self) -> int | None:
        return self.most if self.truncate == -1 else self.truncate

    def _too_long(self, about: str, num: int) -> ValidationError:
        why = ", so that one can be generated" if self.num_generated else ""
        return ValidationError(
            f"the prompt has {about}{num} tokens, but with max_model_len={self.max_model_len}, the "
            f"maximum context length, it may have at most {self.most}{why}; shorten it, have it "
            "cut by truncate_prompt_tokens=-1, or start with a greater max_model_len",
            parameter="prompt",
            value=num,
        )
