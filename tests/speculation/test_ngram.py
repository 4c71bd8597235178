"""The n-gram drafter against a search in plain Python."""

import jax
import numpy as np
import pytest

from jaxllm.speculation import ngram
from jaxllm.speculation.drafter import NO_DRAFT
from jaxllm.speculation.ngram import Ngram

LENGTH = 60
SLOTS = 5


def expected_draft(text: list[int], low: int, high: int, count: int) -> list[int]:
    """Of the places with the longest match the latest; past the end the draft repeats itself."""
    best = (0, 0)
    for place in range(1, len(text)):
        size = 0
        while size < min(high, place) and text[place - 1 - size] == text[-1 - size]:
            size += 1
        if size >= low:
            best = max(best, (size, place))
    if best == (0, 0):
        return [NO_DRAFT] * count
    draft: list[int] = []
    for i in range(count):
        place = best[1] + i
        draft.append(text[place] if place < len(text) else draft[place - len(text)])
    return draft


@pytest.mark.parametrize("chunk", [4096, 16, 7])
@pytest.mark.parametrize(("low", "high", "count"), [(1, 1, 1), (2, 4, 3), (3, 3, 7), (1, 6, 4)])
def test_it_drafts_what_followed_the_longest_match(monkeypatch, low, high, count, chunk):
    monkeypatch.setattr(ngram, "_CHUNK", chunk)
    drafter = Ngram(low, high)
    propose = jax.jit(lambda state, slots, ends: drafter.propose(state, count, slots, ends))
    rng = np.random.default_rng(low + high)
    found = 0
    for _ in range(60):
        num_kinds = rng.integers(2, 6)
        state = rng.integers(num_kinds, size=(SLOTS, LENGTH)).astype(np.int32)
        slots = rng.permutation(SLOTS).astype(np.int32)
        ends = rng.integers(1, LENGTH + 1, size=SLOTS).astype(np.int32)
        drafts = np.asarray(propose(state, slots, ends))
        for slot, end, draft in zip(slots, ends, drafts.tolist(), strict=True):
            wanted = expected_draft(state[slot, :end].tolist(), low, high, count)
            assert draft == wanted
            found += wanted[0] != NO_DRAFT
    assert 50 < found


def test_a_repetition_goes_on():
    drafter = Ngram(2, 4)
    state = np.zeros((1, LENGTH), np.int32)
    state[0, :9] = [9, 8, 7, 1, 2, 1, 2, 1, 2]
    propose = jax.jit(drafter.propose, static_argnums=1)
    drafts = propose(state, 5, np.array([0]), np.array([9]))
    assert drafts.tolist() == [[1, 2, 1, 2, 1]]


def test_it_records_what_counts():
    drafter = Ngram(2, 4)
    text = np.arange(10, 18, dtype=np.int32)
    state = jax.jit(drafter.admit)(np.zeros((3, 8), np.int32), np.int32(1), text)
    tokens = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.int32)
    state = jax.jit(drafter.record)(
        state, tokens, np.array([2, 0, 3]), np.array([1, 0, 3]), np.array([5, 1, 4])
    )
    assert state.tolist() == [[0] * 8, [10, 11, 12, 1, 2, 15, 16, 17], [0] * 8]
