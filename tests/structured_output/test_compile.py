"""Grammars compile within limits; what does not says why, in words for the user."""

import numpy as np
import pytest
from llguidance.numpy import fill_next_token_bitmask

from jaxllm.structured_output.compile import MAX_GRAMMAR_CHARS, compile_grammar, reason_of
from tests.grammars import GRAMMARS, json_grammar

# Two ways to split whatever came before.
AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | "b"'


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("no grammar", "Expected token"),
        ('{"grammars": [{"json_schema": {"type": "array", "not": {}}}]}', 'keys: \\["not"\\]'),
        ('{"grammars": [{"json_schema": {"$ref": "#"}}]}', "allows no text"),
        ("start: /(?<=a)b/", "look-around"),
        ('start: "' + "a" * MAX_GRAMMAR_CHARS + '"', f"at most {MAX_GRAMMAR_CHARS} are allowed"),
    ],
)
def test_what_is_no_grammar_says_so(vocabulary, grammar, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        compile_grammar(vocabulary, grammar)
    assert "<state>" not in str(caught.value) and "non-verbose" not in str(caught.value)


def test_real_grammars_are_within_the_limits(vocabulary):
    large = {
        "enum": {"enum": [f"word {i}" for i in range(3000)]},
        "properties": {"type": "object", "properties": {f"p{i}": {} for i in range(150)}},
        "branches": {"anyOf": [{"type": "object", "required": [f"k{i}"]} for i in range(150)]},
        "free": {"type": "object"},
    }
    for grammar in [*GRAMMARS, *map(json_grammar, large.values())]:
        matcher = compile_grammar(vocabulary, grammar)
        for token in vocabulary.tokenizer.tokenize_str('{"p'):
            fill_next_token_bitmask(matcher, np.empty((1, vocabulary.num_words), np.int32))
            matcher.consume_token(token)


def test_an_ambiguous_grammar_comes_to_an_end_early(vocabulary):
    """It may not take a share of every step that grows with its text."""
    matcher = compile_grammar(vocabulary, AMBIGUOUS)
    [token] = vocabulary.tokenizer.tokenize_str("a")
    mask = np.empty((1, vocabulary.num_words), np.int32)
    for _ in range(400):
        fill_next_token_bitmask(matcher, mask)
        if not matcher.consume_token(token):
            break
    assert matcher.is_error() and "max is 500" in reason_of(matcher)
