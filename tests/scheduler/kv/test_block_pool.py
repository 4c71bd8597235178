import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.scheduler.kv.block_pool import BlockPool

A, B, C = b"a", b"b", b"c"


def cached_pool(contents):
    """A pool of as many blocks, all free and cached, released in this order."""
    pool = BlockPool(len(contents))
    blocks = pool.take(len(contents))
    pool.register(blocks, contents)
    for block in blocks:
        pool.release([block])
    return pool, blocks


def test_blocks_are_handed_out_once():
    pool = BlockPool(5)
    taken = pool.take(2) + pool.take(3)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_more_blocks_than_free_is_a_bug():
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        BlockPool(2).take(3)


def test_releasing_twice_is_a_bug():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


def test_shared_block_is_free_when_the_last_owner_lets_go():
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == 1


def test_blank_blocks_are_used_before_cached_ones():
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.register([first], [A])
    pool.release([first, second])
    pool.take(2)
    assert pool.find(A) == first


def test_least_recently_used_content_goes_first():
    pool, (first, second, _) = cached_pool([A, B, C])
    pool.share([first])
    pool.release([first])
    assert pool.take(1) == [second]
    assert [pool.find(content) is not None for content in (A, B, C)] == [True, False, True]


def test_the_tail_of_a_prefix_goes_before_its_head():
    pool = BlockPool(3)
    blocks = pool.take(3)
    pool.register(blocks, [A, B, C])
    pool.release(blocks)
    pool.take(2)
    assert [pool.find(content) is not None for content in (A, B, C)] == [True, False, False]


def test_cached_block_comes_back_with_its_content():
    pool, (block,) = cached_pool([A])
    assert pool.count_free([block]) == 1
    pool.share([block])
    assert pool.count_free([block]) == 0
    assert pool.find(A) == block


def test_second_block_with_the_same_content_stays_private():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.register([first], [A])
    pool.register([second], [A])
    assert pool.find(A) == first
    pool.release([first, second])
    assert pool.take(1) == [second]


@pytest.mark.parametrize("in_use", [True, False])
def test_forgotten_content_is_not_found(in_use):
    pool, (block, other) = cached_pool([A, B])
    if in_use:
        pool.share([block])
    pool.forget(A)
    pool.forget(A)
    assert pool.find(A) is None
    assert pool.find(B) == other
    pool.check([[block]] if in_use else [])


def test_reset_needs_all_blocks_free():
    pool, (block, _) = cached_pool([A, B])
    pool.share([block])
    assert not pool.reset()
    assert pool.find(B) is not None
    pool.release([block])
    assert pool.reset()
    assert pool.find(A) is pool.find(B) is None
    assert sorted(pool.take(2)) == [0, 1]


@pytest.mark.parametrize(
    ("tables", "message"), [([], "0 in tables"), ([[0, 1], [1]], "2 in tables")]
)
def test_check_notices_wrong_counts(tables, message):
    pool = BlockPool(2)
    pool.take(2)
    with pytest.raises(AssertionError, match=message):
        pool.check(tables)


@given(st.lists(st.tuples(st.sampled_from("take share release register forget".split()),
                          st.integers(0, 7)), max_size=60))  # fmt: skip
def test_any_sequence_of_calls_keeps_the_invariants(calls):
    pool, tables = BlockPool(6), []
    for call, number in calls:
        if call == "take" and number <= pool.num_free:
            tables.append(pool.take(number))
        elif call == "share":
            prefix = [pool.find(bytes([index])) for index in range(number)]
            tables.append([block for block in prefix if block is not None])
            pool.share(tables[-1])
        elif call == "release" and tables:
            pool.release(tables.pop(number % len(tables)))
        elif call == "register" and tables and tables[-1]:
            block = tables[-1][0]
            if pool._hashes[block] is None:
                pool.register([block], [bytes([number])])
        elif call == "forget":
            pool.forget(bytes([number]))
        pool.check(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == 6
