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
# The rest of the limits is as llguidance has it. With its 2000 items in a row, an ambiguous grammar
# took 1.2 s for a mask, and with 500 it took 0.03 s; schemas with hundreds of branches need fewer.
# Messages go to users, so they say nothing of the parser's state.
LIMITS = LLParserLimits(max_items_in_row=500, verbose_errors=False)


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
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    if text in ("", "NoExtension", "NoExtensionBias"):
        return "the grammar allows no text, or no end of a text"
    return text[:500]
