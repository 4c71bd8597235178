"""Where a request is in its grammar, and which tokens the grammar forces from there.

A matcher may say that only one token can come next, and after it again only one. These tokens are
forced, and are kept until they are consumed: the same ones, however many of them a step takes.
"""

from dataclasses import dataclass, field, replace

from llguidance import LLMatcher

from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_output.compile import reason_of


@dataclass(slots=True)
class Form:
    """The matcher of a request, which has consumed its known output tokens."""

    # Whether forced tokens may pass without being sampled: nothing asks what they are.
    skips: bool = False
    matcher: LLMatcher | None = None
    error: str = ""  # why it has no matcher that can go on
    num_consumed: int = 0  # tokens
    # The tokens that were forced after `_num_before` tokens.
    _forced: list[int] = field(default_factory=list)
    _num_before: int = 0

    def forced(self) -> list[int]:
        """The tokens that must come next. They may be none, though only one can come."""
        assert self.matcher is not None
        index = self.num_consumed - self._num_before
        if not 0 <= index < len(self._forced):
            self._forced = self.matcher.compute_ff_tokens()
            self._num_before, index = self.num_consumed, 0
        return self._forced[index:]

    def copy(self) -> "Form":
        """Return a form that goes on by itself. What it cannot do does not fail this one."""
        matcher = None if self.matcher is None else self.matcher.deep_copy()
        return replace(self, matcher=matcher)

    def consume(self, tokens: list[int]) -> None:
        """Go on by tokens, as far as the matcher takes them."""
        for token in tokens:
            if self.matcher is None:
                return
            self.num_consumed += 1
            if not self.matcher.consume_token(token):
                self.fail()

    def go_back(self, num_tokens: int) -> None:
        """Forget the latest tokens."""
        if self.matcher is not None and num_tokens:
            if not self.matcher.rollback(num_tokens):
                self.fail()
            self.num_consumed -= num_tokens

    def fail(self) -> None:
        """Note that the matcher cannot go on."""
        assert self.matcher is not None
        self.matcher, self.error = None, message(reason_of(self.matcher))


def may_skip(params: SamplingParams) -> bool:
    """Whether a request's forced tokens may pass without being sampled. Logprobs are of sampled
    tokens, and the tables of penalties and bad words count these."""
    return (
        params.logprobs is None
        and not params.bad_words
        and params.presence_penalty == params.frequency_penalty == 0
        and params.repetition_penalty == 1
    )


def message(reason: str) -> str:
    """What a request ends with whose grammar fails."""
    return f"structured_outputs: {reason}"[:500]
