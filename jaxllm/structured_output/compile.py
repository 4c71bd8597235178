"""Compiles a grammar into a matcher, within limits.

A grammar comes from a request, so it may be hostile. llguidance bounds its own work; the limits
here are those of an engine whose other requests wait for the mask of this one.
"""

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from llguidance.numpy import fill_next_token_bitmask

from jaxllm.structured_output.vocabulary import Vocabulary

# The characters of the longest grammar. An enum of 20,000 words has some 300,000.
MAX_GRAMMAR_CHARS = 1 << 20
# A mask may take 14 ms of regular expressions and 2.5 ms of rules. Everything else is as llguidance
# has it. Messages go to users, so they say nothing of the parser's state.
LIMITS = LLParserLimits(verbose_errors=False)


def compile_grammar(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    """Compile a grammar, as `LLMatcher` takes it, and try a mask: some grammars fail only there.
    Raise ValueError with the reason if it is no grammar, or needs more work than the limits allow.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ValueError(
            f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are allowed"
        )
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
    check(matcher)
    fill_next_token_bitmask(matcher, np.empty((1, vocabulary.num_words), np.int32))
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raise ValueError with the reason if the matcher has failed."""
    if matcher.is_error():
        raise ValueError(reason_of(matcher))


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher has failed, for the user."""
    text = matcher.get_error().partition("\n<state>")[0].strip()
    return text[:500] or "the grammar cannot be matched any further"
