"""What the GPU kernels work through covers every key and query once, in even shares."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxllm_kernels.common import cdiv
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.ragged_paged_attention.gpu_worklist import (
    cut_prefills,
    item_of_worker,
    split_decodes,
)

NUM_ROWS, NUM_KV_HEADS, BLOCK, LOAD, NUM_WORKERS = 6, 2, 128, 16, 5


def make_batch(decode_contexts, prefills=(), short=()) -> RaggedBatch:
    """Decodes with these contexts, then rows of (tokens, context), short ones first, then rows
    without tokens."""
    rows = [*((1, context) for context in decode_contexts), *short, *prefills]
    rows += [(0, 0)] * (NUM_ROWS - len(rows))
    lengths, contexts = np.array(rows, np.int32).T
    return RaggedBatch(
        query_starts=jnp.asarray(np.concatenate([[0], lengths.cumsum()]), jnp.int32),
        context_lens=jnp.asarray(contexts),
        block_tables=jnp.zeros((NUM_ROWS, 1), jnp.int32),
        num_decodes=jnp.int32(len(decode_contexts)),
        num_short=jnp.int32(len(short)),
        block_size=16,
        decode_only=False,
    )


def split(batch, sliding_window=None, short_parts=1):
    return split_decodes(
        batch,
        num_kv_heads=NUM_KV_HEADS,
        short_parts=short_parts,
        sliding_window=sliding_window,
        block_tokens=BLOCK,
        load_tokens=LOAD,
        num_workers=NUM_WORKERS,
    )


contexts_of_decodes = st.lists(st.integers(1, 2000), max_size=NUM_ROWS - 1)
windows = st.sampled_from([None, 1, 5, 300])


@settings(max_examples=60, deadline=None)
@given(contexts_of_decodes, windows)
def test_every_key_of_every_decode_is_attended_to_once(contexts, window):
    work = split(make_batch(contexts, [(5, 5)]), window)
    seen = np.zeros((NUM_ROWS, NUM_KV_HEADS, 2000), int)
    worker_items = np.asarray(work.worker_items)
    for i in range(worker_items[0], worker_items[-1]):
        row, head, start, end, _ = (int(x[i]) for x in work.items)
        assert start % LOAD == 0
        seen[row, head, start:end] += 1
    expected = np.zeros_like(seen)
    for row, context in enumerate(contexts):
        first = max(context - window, 0) // LOAD * LOAD if window else 0
        expected[row, :, first:context] = 1
    np.testing.assert_array_equal(seen, expected)


@settings(max_examples=60, deadline=None)
@given(contexts_of_decodes)
def test_no_worker_has_more_than_its_share_of_blocks(contexts):
    work = split(make_batch(contexts))
    start, end = np.asarray(work.items.start), np.asarray(work.items.end)
    blocks = -(-(end - start) // BLOCK)
    total = NUM_KV_HEADS * sum(cdiv(context, BLOCK) for context in contexts)
    for first, last in zip(work.worker_items, work.worker_items[1:], strict=False):
        assert blocks[first:last].sum() <= cdiv(total, NUM_WORKERS)


@settings(max_examples=60, deadline=None)
@given(contexts_of_decodes, windows)
def test_no_item_is_empty(contexts, window):
    work = split(make_batch(contexts, [(5, 5)]), window)
    num_items = int(work.worker_items[-1])
    assert (work.items.end > work.items.start)[:num_items].all()


@settings(max_examples=60, deadline=None)
@given(contexts_of_decodes)
def test_partial_results_are_merged_where_they_belong(contexts):
    work = split(make_batch(contexts))
    merged = []
    for pair, (first, last) in enumerate(zip(work.pair_first, work.pair_last, strict=True)):
        for i in range(int(first), int(last)):
            if work.items.end[i] > work.items.start[i]:
                row, head = int(work.items.row[i]), int(work.items.head[i])
                assert pair == row * NUM_KV_HEADS + head
            assert i < work.worker_items[-1]
            merged.append(i)
    with_keys = np.flatnonzero(np.asarray(work.items.end) > np.asarray(work.items.start))
    assert set(with_keys) <= set(merged)
    assert len(set(merged)) == len(merged)


short_rows = st.lists(
    st.tuples(st.integers(2, 8), st.integers(0, 1000)).map(lambda row: (row[0], sum(row))),
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 2000), max_size=2), short_rows, windows, st.sampled_from([1, 3]))
def test_every_part_of_a_short_row_attends_to_every_key_once(contexts, short, window, parts):
    batch = make_batch(contexts, [(9, 9)], short)
    work = jax.tree.map(np.asarray, split(batch, window, parts))
    row, head, start, end, _ = work.items
    num_items, first_short = work.worker_items[-1], work.short.first_item[0]
    assert (end > start)[:num_items].all()
    assert (row[:first_short] < len(contexts)).all()

    seen = np.zeros((parts, NUM_ROWS, NUM_KV_HEADS, 2000), int)
    pairs = zip(work.pair_first, work.pair_last, strict=True)
    for pair, (first, last) in zip(np.ndindex(seen.shape[:3]), pairs, strict=True):
        for i in range(first, last):
            assert pair == (work.short.part[i], row[i], head[i])
            seen[pair][start[i] : end[i]] += 1
    expected = np.zeros_like(seen)
    for i, (tokens, context) in enumerate([*((1, context) for context in contexts), *short]):
        first = max(context - tokens + 1 - window, 0) // LOAD * LOAD if window else 0
        expected[: parts if tokens > 1 else 1, i, :, first:context] = 1
    np.testing.assert_array_equal(seen, expected)

    for i in range(first_short, num_items):
        tokens, context = short[row[i] - len(contexts)]
        assert work.short.token[i] == batch.query_starts[row[i]]
        assert work.short.position[i] == context - tokens


@settings(max_examples=40, deadline=None)
@given(short_rows)
def test_parts_are_at_the_same_keys_at_the_same_time(short):
    num_parts = 3
    work = jax.tree.map(np.asarray, split(make_batch([], short=short), None, num_parts))
    row, head, start, end, _ = work.items
    times = {}  # of each block, by part: the blocks that its worker has done before
    for first, last in itertools.pairwise(work.worker_items):
        before = itertools.count()
        for i in range(first, last):
            for key in range(start[i], end[i], BLOCK):
                block = row[i], head[i], key
                times.setdefault(block, {})[work.short.part[i]] = next(before)
    for by_part in times.values():
        assert len(by_part) == num_parts
        assert len(set(by_part.values())) == 1


def test_a_long_row_is_shared_out():
    work = split(make_batch([1280]))  # 2 heads of 10 blocks over 5 workers
    np.testing.assert_array_equal(np.diff(work.worker_items), [1, 1, 2, 1, 1])


def test_a_batch_without_decodes_is_no_work():
    work = split(make_batch([], [(5, 5)]))
    assert int(work.worker_items[-1]) == 0
    np.testing.assert_array_equal(work.pair_first, work.pair_last)


@st.composite
def rows_to_prefill(draw):
    rows, room = [], 64
    for _ in range(draw(st.integers(0, 4))):
        tokens = draw(st.integers(0, room))
        room -= tokens
        rows.append((tokens, tokens + draw(st.integers(0, 100)) if tokens else 0))
    return rows


@pytest.mark.parametrize("tile_tokens", [8, 128])
@settings(max_examples=60, deadline=None)
@given(rows_to_prefill())
def test_every_query_of_every_prefill_is_in_one_tile(tile_tokens, rows):
    batch = make_batch([7, 9], rows)
    tiles = cut_prefills(batch, num_tokens=66, tile_tokens=tile_tokens)
    seen = np.zeros(66, int)
    position = np.full(66, -1)
    for i in range(int(tiles.num_tiles[0])):
        row, token, num_tokens, first = (int(x[i]) for x in tiles[:-1])
        assert 1 <= num_tokens <= tile_tokens
        assert batch.query_starts[row] <= token
        assert token + num_tokens <= batch.query_starts[row + 1]
        seen[token : token + num_tokens] += 1
        position[token : token + num_tokens] = first + np.arange(num_tokens)
    is_prefill = np.arange(66) - 2 < sum(tokens for tokens, _ in rows)
    is_prefill[:2] = False
    np.testing.assert_array_equal(seen, is_prefill)
    expected = [np.arange(context - tokens, context) for tokens, context in rows]
    np.testing.assert_array_equal(position[is_prefill], np.concatenate([[], *expected]))


def test_short_rows_are_not_in_tiles():
    batch = make_batch([7], [(9, 9)], short=[(2, 5), (8, 8)])
    tiles = cut_prefills(batch, num_tokens=32, tile_tokens=128)
    assert int(tiles.num_tiles[0]) == 1
    assert (int(tiles.row[0]), int(tiles.token[0])) == (3, 11)


def test_tiles_with_many_keys_come_first():
    tiles = cut_prefills(make_batch([], [(3, 3), (20, 90)]), num_tokens=64, tile_tokens=8)
    np.testing.assert_array_equal(tiles.position[:4], [86, 78, 70, 0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 7))
def test_every_item_is_one_workers(num_items, num_workers):
    turns = range(cdiv(num_items, num_workers))
    items = [
        [int(item_of_worker(worker, jnp.int32(i), num_workers)) for i in turns]
        for worker in range(num_workers)
    ]
    assert sorted(item for own in items for item in own if item < num_items) == [*range(num_items)]
    # After the first item that is not there, a worker has no other.
    for own in items:
        assert own == sorted(own)


def test_turns_go_forth_and_back():
    items = [item_of_worker(0, jnp.int32(i), 4) for i in range(4)]
    assert [int(item) for item in items] == [0, 7, 8, 15]
