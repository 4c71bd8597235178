import pytest

from jaxllm.cache_groups import CacheGroup, Chunk
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.request import Request

EVERYTHING = CacheGroup(window=None, num_blocks=8, max_blocks_per_request=8)


@pytest.fixture
def manager():
    return KVCacheManager(groups=[EVERYTHING], block_size=4, enable_prefix_caching=True)


@pytest.fixture
def new(manager, make_request):
    def new(prompt, **fields):
        message = make_request("r", prompt, **fields)
        return Request(message, hash_root=manager.hash_root(message.cache_salt))

    return new


def computed(manager, request, num_tokens):
    """Admit a request and compute some of its tokens."""
    assert manager.admit(request, manager.find_prefix(request), reserve=0)
    request.num_computed_tokens = num_tokens
    manager.advance(request)
    return request


def test_admission_takes_blocks_for_the_whole_prompt(manager, new):
    request = new(list(range(9)))
    assert manager.admit(request, 0, reserve=0)
    assert len(request.tables[0].blocks) == 3
    manager.check([request])


def test_admission_leaves_the_reserve(manager, new):
    assert not manager.admit(new(list(range(20))), 0, reserve=4)
    assert manager.num_blocks_used == [0]
    assert manager.admit(new(list(range(20))), 0, reserve=3)


def test_admission_does_not_count_on_cached_blocks_twice(manager, new):
    prompt = list(range(28))
    manager.free(computed(manager, new(prompt), 28))
    blocker = new([9] * 4)
    assert manager.admit(blocker, 0, reserve=0)
    longer = new([*prompt, 1, 2, 3, 4, 5])
    prefix = manager.find_prefix(longer)
    assert prefix == 7
    # Seven blocks are free, all of them part of the prefix; two more are needed.
    assert not manager.admit(longer, prefix, reserve=0)
    manager.check([blocker])


def test_only_computed_full_blocks_are_found(manager, new):
    computed(manager, new(list(range(12))), 7)
    assert manager.find_prefix(new(list(range(12)))) == 1


def test_prefix_ends_where_the_tokens_differ(manager, new):
    computed(manager, new(list(range(12))), 12)
    assert manager.find_prefix(new([*range(5), 99, *range(6, 12)])) == 1
    assert manager.find_prefix(new([99, *range(1, 12)])) == 0


def test_last_token_is_never_taken_from_the_cache(manager, new):
    computed(manager, new(list(range(12))), 12)
    assert manager.find_prefix(new(list(range(12)))) == 2
    assert manager.find_prefix(new(list(range(13)))) == 3


def test_block_of_unknown_tokens_is_registered_when_they_are_known(manager, new):
    request = computed(manager, new(list(range(7))), 7)
    request.num_tokens, request.num_computed_tokens = 8, 8  # a token in flight fills the block
    manager.advance(request)
    follow_up = [*range(7), 42, 0]
    assert manager.find_prefix(new(follow_up)) == 1
    request.output_token_ids.append(42)
    manager.advance(request)
    assert manager.find_prefix(new(follow_up)) == 2


def test_hashes_survive_preemption_and_are_not_computed_again(manager, new):
    request = computed(manager, new(list(range(12))), 12)
    before = list(request.block_hashes)
    manager.free(request)
    request.num_computed_tokens = 0
    assert manager.find_prefix(request) == 2
    assert all(a is b for a, b in zip(before, request.block_hashes, strict=True))


def test_a_request_reads_nothing_while_it_is_barred(manager, new):
    computed(manager, new(list(range(12))), 12)
    barred = new(list(range(12)))
    barred.num_cache_bars = 2
    assert manager.find_prefix(barred) == 0
    barred.num_cache_bars = 1
    assert manager.find_prefix(barred) == 0
    barred.num_cache_bars = 0
    assert manager.find_prefix(barred) == 2


def test_forgotten_blocks_are_not_found(manager, new):
    request = computed(manager, new(list(range(12))), 12)
    manager.forget(request)
    assert manager.find_prefix(new(list(range(12)))) == 0


def test_groups_share_with_caching_off(make_request):
    manager = KVCacheManager(groups=[EVERYTHING], block_size=4, enable_prefix_caching=False)
    leader, follower, stranger = (
        Request(make_request(name, list(range(12))), hash_root=manager.hash_root(None))
        for name in "lfs"
    )
    computed(manager, leader, 12)
    manager.let_share(leader, follower)
    assert manager.find_prefix(follower) == 2
    assert manager.admit(follower, 2, reserve=0)
    assert follower.tables[0].blocks[:2] == leader.tables[0].blocks[:2]
    assert manager.find_prefix(stranger) == 0


# ---- groups with windows


@pytest.fixture
def windowed():
    """A group that keeps everything, and one whose tokens see nine."""
    groups = [
        CacheGroup(window=None, num_blocks=16, max_blocks_per_request=16),
        CacheGroup(window=9, num_blocks=12, max_blocks_per_request=5),
    ]
    return KVCacheManager(groups=groups, block_size=4, enable_prefix_caching=True)


def test_a_window_group_reserves_what_a_request_can_hold_there(windowed, new):
    request = new(list(range(40)))
    assert windowed.admit(request, 0, reserve=0)
    assert windowed.num_blocks_used == [10, 5]
    assert request.room == 20
    windowed.check([request])


def test_blocks_behind_the_window_are_given_back(windowed, new):
    request = computed(windowed, new(list(range(40))), 12)
    assert request.tables[1].start == 1  # the next token is 12 and sees 4 to 12
    request.num_computed_tokens = 15
    windowed.advance(request)
    assert request.tables[1].start == 1  # token 15 sees token 7, the last one of block 1
    request.num_computed_tokens = 16
    windowed.advance(request)
    assert request.tables[1].start == 2
    windowed.check([request])
    assert windowed.extend(request, 40)
    assert request.room == 40
    assert windowed.num_blocks_used == [10, 8]
    windowed.free(request)
    assert windowed.num_blocks_used == [0, 0]


def test_blocks_of_earlier_chunks_are_given_back(new):
    groups = [
        CacheGroup(window=window, num_blocks=12, max_blocks_per_request=6)
        for window in (None, Chunk(10))
    ]
    manager = KVCacheManager(groups=groups, block_size=4, enable_prefix_caching=True)
    request = computed(manager, new(list(range(24))), 19)
    assert request.tables[1].start == 2  # token 19 sees 10 to 19
    request.num_computed_tokens = 20
    manager.advance(request)
    assert request.tables[1].start == 5
    manager.check([request])
    manager.free(request)
    # Token 20 begins a chunk, so it sees nothing of what is before; token 16 sees 10 to 15.
    manager._pools[1].forget(request.block_hashes[3])
    assert manager.find_prefix(new([*range(20), 99])) == 5
    assert manager.find_prefix(new([*range(18), 99])) == 3


@pytest.mark.parametrize("window", [Chunk(8), 1])
def test_a_prefix_is_found_only_if_it_has_been_computed(window, new):
    group = CacheGroup(window=window, num_blocks=12, max_blocks_per_request=6)
    manager = KVCacheManager(groups=[group], block_size=4, enable_prefix_caching=True)
    prompt = list(range(18))
    assert manager.find_prefix(new(prompt)) == 0  # token 16 would read no block
    request = computed(manager, new(prompt), 18)
    manager.free(request)
    assert manager.find_prefix(new(prompt)) == 4
    assert manager.find_prefix(new([99, *prompt])) == 0


def computed_in_two_chunks(windowed, request):
    """Compute 24 tokens of a request, the second half in blocks that it gets only then."""
    computed(windowed, request, 12)
    request.num_computed_tokens = 24
    assert windowed.extend(request, 24)
    windowed.advance(request)
    return request


def test_a_prefix_is_found_if_every_group_has_what_it_reads(windowed, new):
    prompt = list(range(24))
    request = computed_in_two_chunks(windowed, new(prompt))
    windowed.free(request)
    assert windowed.find_prefix(new([*prompt, 99])) == 6
    windowed._pools[1].forget(request.block_hashes[0])  # token 24 does not see it
    assert windowed.find_prefix(new([*prompt, 99])) == 6
    windowed._pools[1].forget(request.block_hashes[4])
    assert windowed.find_prefix(new([*prompt, 99])) == 4
    windowed._pools[1].forget(request.block_hashes[2])  # 2 blocks read block 0, too
    assert windowed.find_prefix(new([*prompt, 99])) == 0
    windowed._pools[0].forget(request.block_hashes[5])
    assert windowed.find_prefix(new([*prompt, 99])) == 0


def test_a_prefix_takes_only_the_blocks_that_are_read(windowed, new):
    prompt = list(range(24))
    request = computed_in_two_chunks(windowed, new(prompt))
    other = new([*prompt, 99])
    assert windowed.admit(other, windowed.find_prefix(other), reserve=0)
    other.num_computed_tokens = 24
    assert (other.tables[1].start, other.tables[1].end) == (4, 7)
    assert other.tables[0].blocks[:6] == request.tables[0].blocks
    assert other.tables[1].blocks[:2] == request.tables[1].blocks
    windowed.check([request, other])


def test_room_is_given_in_all_groups_or_in_none(windowed, new):
    first, second = new(list(range(40))), new([7] * 20)
    assert windowed.admit(first, 0, reserve=0) and windowed.admit(second, 0, reserve=0)
    used = windowed.num_blocks_used
    assert used == [15, 10]
    assert windowed.num_shortages == [0, 0]
    assert not windowed.extend(first, 40)
    assert not windowed.admit(new([8] * 16), 0, reserve=0)
    assert windowed.num_shortages == [1, 1]
    assert windowed.num_blocks_used == used
    assert first.room == 20
    windowed.check([first, second])
