"""Masks are what brute force says; compiled grammars are kept, and not too many of them."""

import random

import numpy as np
import pytest

from jaxllm.structured_output import matchers
from jaxllm.structured_output.compile import compile_grammar
from jaxllm.structured_output.matchers import CompiledGrammars, Masks
from tests.grammars import GRAMMARS, SCHEMAS, is_valid


def tokens_of(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


@pytest.mark.parametrize("grammar", range(len(GRAMMARS)))
def test_a_mask_has_the_tokens_that_could_come_next(vocabulary, grammar):
    rng = random.Random(grammar)
    matcher = compile_grammar(vocabulary, GRAMMARS[grammar])
    mask, text = np.empty((1, vocabulary.num_words), np.int32), b""
    while not matcher.is_stopped():
        Masks().fill([(matcher, 0)], mask)
        legal = [t for t in range(vocabulary.size) if matcher.validate_tokens([t]) == 1]
        assert tokens_of(mask[0]).tolist() == legal
        # Prefer what closes, so that the walk ends.
        closing = [t for t in legal if vocabulary.tokenizer.decode_bytes([t])[:1] in b'"]}']
        token = rng.choice(closing or legal)
        assert matcher.consume_token(token)
        text += b"" if token == 0 else vocabulary.tokenizer.decode_bytes([token])
    assert is_valid(text.decode(), SCHEMAS[grammar])


def test_many_rows_have_the_masks_that_they_have_alone(vocabulary):
    rows = [compile_grammar(vocabulary, GRAMMARS[i % len(GRAMMARS)]) for i in range(20)]
    for i, matcher in enumerate(rows):
        if i % 3:
            matcher.consume_token(vocabulary.tokenizer.tokenize_str('"')[0])
    alone = np.empty((20, vocabulary.num_words), np.int32)
    for i, matcher in enumerate(rows):
        Masks().fill([(matcher, i)], alone)
    together = np.full_like(alone, 7)
    chosen = [(matcher, i) for i, matcher in enumerate(rows) if i != 5]
    Masks().fill(chosen, together)
    assert (together[5] == 7).all()
    together[5] = alone[5]
    assert (together == alone).all()


def test_equal_grammars_compile_once(vocabulary):
    loads = []
    grammars = CompiledGrammars(lambda: loads.append(1) or vocabulary)
    first = grammars.get(GRAMMARS[0])
    assert grammars.get(GRAMMARS[0]) is first and grammars.get(GRAMMARS[1]) is not first
    assert not first.result().is_stopped()
    grammars.close()


def test_few_are_kept_and_those_that_were_used_last(vocabulary, monkeypatch):
    monkeypatch.setattr(matchers, "_MAX_KEPT", 3)
    grammars = CompiledGrammars(lambda: vocabulary)
    names = [f'start: "{letter}"' for letter in "abcd"]
    a, b, c = map(grammars.get, names[:3])
    assert grammars.get(names[0]) is a
    grammars.get(names[3])
    assert len(grammars) == 3
    assert grammars.get(names[0]) is a and grammars.get(names[2]) is c
    assert grammars.get(names[1]) is not b
    # Long ones take the room of several.
    monkeypatch.setattr(matchers, "_MAX_KEPT_CHARS", 40)
    long = grammars.get(f'start: "{"x" * 50}"')
    assert len(grammars) == 1 and not long.result().is_stopped()
    grammars.close()


def test_an_error_is_the_answer_and_nothing_raises(vocabulary):
    grammars = CompiledGrammars(lambda: vocabulary)
    assert "Expected token" in str(grammars.get("none").exception())
    grammars.close()

    def missing():
        raise ValueError("there is no tokenizer")

    assert str(CompiledGrammars(missing).get(GRAMMARS[0]).exception()) == "there is no tokenizer"
