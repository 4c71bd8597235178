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
    DecodeSplit,
    Pair,
    cut_prefills,
    item_of_worker,
    list_items,
    split_decodes,
)

cut_prefills = jax.jit(cut_prefills, static_argnames=("num_tokens", "tile_tokens"))
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


def split_of(sliding_window=None, short_parts=1) -> DecodeSplit:
    return DecodeSplit(
        num_kv_heads=NUM_KV_HEADS,
        short_parts=short_parts,
        sliding_window=sliding_window,
        block_tokens=BLOCK,
        load_tokens=LOAD,
        num_workers=NUM_WORKERS,
    )


def test_layers_that_are_divided_otherwise_may_be_in_one_step():
    """JAX sorts the keys of a dict."""
    splits = [split_of(sliding_window=window) for window in (None, 64, 32)]
    leaves = jax.tree.leaves({split: window for window, split in enumerate(splits)})
    assert sorted(leaves) == [0, 1, 2]


def flat(of_workers):
    return list(itertools.chain.from_iterable(of_workers))


def num_blocks(item) -> int:
    return cdiv(item.end - item.start, BLOCK)


contexts_of_decodes = st.lists(st.integers(1, 2000), max_size=NUM_ROWS - 1)
windows = st.sampled_from([None, 1, 5, 300])


@settings(max_examples=40, deadline=None)
@given(contexts_of_decodes, windows)
def test_every_key_of_every_decode_is_attended_to_once(contexts, window):
    of_workers = list_items(make_batch(contexts, [(5, 5)]), split_of(window))
    seen = np.zeros((NUM_ROWS, NUM_KV_HEADS, 2000), int)
    for item in flat(of_workers):
        assert item.start % LOAD == 0
        assert item.start < item.end
        seen[item.pair.row, item.pair.head, item.start : item.end] += 1
    expected = np.zeros_like(seen)
    for row, context in enumerate(contexts):
        first = max(context - window, 0) // LOAD * LOAD if window else 0
        expected[row, :, first:context] = 1
    np.testing.assert_array_equal(seen, expected)


@settings(max_examples=40, deadline=None)
@given(contexts_of_decodes)
def test_no_worker_has_more_than_its_share_of_blocks(contexts):
    of_workers = list_items(make_batch(contexts), split_of())
    total = NUM_KV_HEADS * sum(cdiv(context, BLOCK) for context in contexts)
    for items in of_workers:
        assert sum(map(num_blocks, items)) <= cdiv(total, NUM_WORKERS)


def assert_merged_where_they_belong(batch, split):
    """Each pair merges the numbers that its items have."""
    work = split_decodes(batch, split)
    shares = split.shares(work)
    numbers = {}
    for worker, items in enumerate(list_items(batch, split)):
        for item in items:
            numbers.setdefault(item.pair, []).append(int(split.number(shares, item.pair)) + worker)
    assert len({*flat(numbers.values())}) == len(flat(numbers.values()))
    for row, head, part in np.ndindex(NUM_ROWS, NUM_KV_HEADS, split.short_parts):
        pair = Pair(row, head, part)
        is_decode = row < batch.num_decodes
        if is_decode and part > 0:
            continue  # the kernel skips them
        number = int(split.number(shares, pair))
        first, last = map(int, split.workers(work, shares, pair))
        assert numbers.get(pair, []) == [number + worker for worker in range(first, last)]


@settings(max_examples=10, deadline=None)
@given(contexts_of_decodes)
def test_partial_results_are_merged_where_they_belong(contexts):
    assert_merged_where_they_belong(make_batch(contexts), split_of())


short_rows = st.lists(
    st.tuples(st.integers(2, 8), st.integers(0, 1000)).map(lambda row: (row[0], sum(row))),
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 2000), max_size=2), short_rows, windows, st.sampled_from([1, 3]))
def test_every_part_of_a_short_row_attends_to_every_key_once(contexts, short, window, parts):
    batch = make_batch(contexts, [(9, 9)], short)
    seen = np.zeros((parts, NUM_ROWS, NUM_KV_HEADS, 2000), int)
    for items in list_items(batch, split_of(window, parts)):
        are_short = [item.pair.row >= len(contexts) for item in items]
        assert are_short == sorted(are_short)  # decodes come first
        for item in items:
            assert item.start < item.end
            row, head, part = item.pair
            seen[part, row, head, item.start : item.end] += 1
    expected = np.zeros_like(seen)
    for i, (tokens, context) in enumerate([*((1, context) for context in contexts), *short]):
        first = max(context - tokens + 1 - window, 0) // LOAD * LOAD if window else 0
        expected[: parts if tokens > 1 else 1, i, :, first:context] = 1
    np.testing.assert_array_equal(seen, expected)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 2000), max_size=2), short_rows, st.sampled_from([1, 3]))
def test_parts_are_merged_where_they_belong(contexts, short, parts):
    batch = make_batch(contexts, [(9, 9)], short)
    assert_merged_where_they_belong(batch, split_of(short_parts=parts))


@settings(max_examples=40, deadline=None)
@given(short_rows)
def test_parts_are_at_the_same_keys_at_the_same_time(short):
    num_parts = 3
    of_workers = list_items(make_batch([], short=short), split_of(None, num_parts))
    times = {}  # of each block, by part: the blocks that its worker has done before
    for items in of_workers:
        before = itertools.count()
        for item in items:
            for key in range(item.start, item.end, BLOCK):
                block = item.pair.row, item.pair.head, key
                times.setdefault(block, {})[item.pair.part] = next(before)
    for by_part in times.values():
        assert len(by_part) == num_parts
        assert len(set(by_part.values())) == 1


def test_a_long_row_is_shared_out():
    of_workers = list_items(make_batch([1280]), split_of())  # 2 heads of 10 blocks over 5 workers
    assert [len(items) for items in of_workers] == [1, 1, 2, 1, 1]


def test_a_batch_without_decodes_is_no_work():
    assert not flat(list_items(make_batch([], [(5, 5)]), split_of()))


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
        row, token, num_tokens, first = (int(x[i]) for x in tiles[:4])
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
