import pytest

from jaxllm.scheduler.kv_cache_manager import KVCacheManager
from jaxllm.scheduler.request import Request


@pytest.fixture
def manager():
    return KVCacheManager(num_blocks=8, block_size=4, enable_prefix_caching=True)


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
    manager.register(request)
    return request


def test_admission_takes_blocks_for_the_whole_prompt(manager, new):
    request = new(list(range(9)))
    assert manager.admit(request, [], reserve=0)
    assert len(request.block_ids) == 3
    manager.pool.check([request.block_ids])


def test_admission_leaves_the_reserve(manager, new):
    assert not manager.admit(new(list(range(20))), [], reserve=4)
    assert manager.pool.num_used == 0
    assert manager.admit(new(list(range(20))), [], reserve=3)


def test_admission_does_not_count_on_cached_blocks_twice(manager, new):
    prompt = list(range(28))
    manager.free(computed(manager, new(prompt), 28))
    blocker = new([9] * 4)
    assert manager.admit(blocker, [], reserve=0)
    longer = new([*prompt, 1, 2, 3, 4, 5])
    prefix = manager.find_prefix(longer)
    assert len(prefix) == 7
    # Seven blocks are free, all of them part of the prefix; two more are needed.
    assert not manager.admit(longer, prefix, reserve=0)
    manager.pool.check([blocker.block_ids])


def test_only_computed_full_blocks_are_found(manager, new):
    computed(manager, new(list(range(12))), 7)
    assert len(manager.find_prefix(new(list(range(12))))) == 1


def test_prefix_ends_where_the_tokens_differ(manager, new):
    computed(manager, new(list(range(12))), 12)
    assert len(manager.find_prefix(new([*range(5), 99, *range(6, 12)]))) == 1
    assert manager.find_prefix(new([99, *range(1, 12)])) == []


def test_last_token_is_never_taken_from_the_cache(manager, new):
    computed(manager, new(list(range(12))), 12)
    assert len(manager.find_prefix(new(list(range(12))))) == 2
    assert len(manager.find_prefix(new(list(range(13))))) == 3


def test_block_of_unknown_tokens_is_registered_when_they_are_known(manager, new):
    request = computed(manager, new(list(range(7))), 7)
    request.num_tokens, request.num_computed_tokens = 8, 8  # a token in flight fills the block
    manager.register(request)
    follow_up = [*range(7), 42, 0]
    assert len(manager.find_prefix(new(follow_up))) == 1
    request.output_token_ids.append(42)
    manager.register(request)
    assert len(manager.find_prefix(new(follow_up))) == 2


def test_hashes_survive_preemption_and_are_not_computed_again(manager, new):
    request = computed(manager, new(list(range(12))), 12)
    before = list(request.block_hashes)
    manager.free(request)
    request.num_computed_tokens = 0
    assert len(manager.find_prefix(request)) == 2
    assert all(a is b for a, b in zip(before, request.block_hashes, strict=True))


def test_a_request_reads_nothing_while_it_is_barred(manager, new):
    computed(manager, new(list(range(12))), 12)
    barred = new(list(range(12)))
    barred.num_cache_bars = 2
    assert manager.find_prefix(barred) == []
    barred.num_cache_bars = 1
    assert manager.find_prefix(barred) == []
    barred.num_cache_bars = 0
    assert len(manager.find_prefix(barred)) == 2


def test_forgotten_blocks_are_not_found(manager, new):
    request = computed(manager, new(list(range(12))), 12)
    manager.forget(request)
    assert manager.find_prefix(new(list(range(12)))) == []


def test_groups_share_with_caching_off(make_request):
    manager = KVCacheManager(num_blocks=8, block_size=4, enable_prefix_caching=False)
    leader, follower, stranger = (
        Request(make_request(name, list(range(12))), hash_root=manager.hash_root(None))
        for name in "lfs"
    )
    computed(manager, leader, 12)
    manager.group(leader, follower)
    assert manager.find_prefix(follower) == leader.block_ids[:2]
    assert manager.find_prefix(stranger) == []
