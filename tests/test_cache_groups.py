"""How the cache is divided among groups of layers, and what fits into it."""

import pytest

from jaxllm.cache_groups import (
    CacheGroup,
    CacheSizes,
    Chunk,
    blocks_held,
    describe_groups,
    describe_room,
    group_windows,
    room_for,
    shown_lengths,
)


def divided(windows, num_blocks=10_000, *, max_model_len=32_768, **sizes):
    sizes = CacheSizes(
        block_size=16, max_model_len=max_model_len, max_num_batched_tokens=256, **sizes
    )
    return sizes.divide(windows, num_blocks)


@pytest.mark.parametrize("length", [300, 4096, 20_000])
def test_requests_of_the_stated_length_find_the_same_room_in_every_group(length):
    groups = divided((None, 1024, 128), request_len=length)
    assert groups[0].num_blocks == 10_000
    rooms = [room_for([group], length, 16) for group in groups]
    assert max(rooms) - min(rooms) <= 1


def test_other_lengths_find_less_room_than_a_division_for_them():
    for length, other in ((512, 16_384), (16_384, 512)):
        for windows in ((None, 1024), (None, 1024, 64)):
            # Layers of all groups take the same memory, five in a window for one without.
            def room(groups, context):
                blocks = sum(group.num_blocks * (5 if group.window else 1) for group in groups)
                return room_for(groups, context, 16) / blocks

            for_it = divided(windows, request_len=length)
            for_another = divided(windows, request_len=other)
            assert room(for_it, length) > room(for_another, length)


def test_the_length_is_8192_or_the_longest_there_can_be():
    assert divided((None, 1024)) == divided((None, 1024), request_len=8192)
    assert divided((None, 64), max_model_len=2048) == divided(
        (None, 64), max_model_len=2048, request_len=10**6
    )


def test_one_request_of_the_longest_has_room_in_every_group():
    for group in divided((None, 1024), num_blocks=1, request_len=32_768):
        assert group.window is None or group.num_blocks >= group.max_blocks_per_request


def test_gemma_3_27b_needs_24_percent_of_the_cache_of_one_group():
    num_layers = {None: 10, 1024: 52}
    sizes = CacheSizes(block_size=16, max_model_len=32_768, max_num_batched_tokens=2048)
    held = sum(num * sizes.max_blocks(window) for window, num in num_layers.items())
    in_one_group = sum(num_layers.values()) * sizes.max_blocks(None)
    assert held / in_one_group == pytest.approx(0.24, abs=0.005)


def test_blocks_held_by_a_decoding_request():
    for window in (1, 2, 15, 16, 17, 18, 40):
        seen = {
            len({position // 16 for position in range(end - window, end)})
            for end in range(200, 232)
        }
        assert blocks_held(window, 10_000, 16) == max(seen), window
    assert blocks_held(None, 33, 16) == blocks_held(1024, 33, 16) == 3


def test_blocks_held_behind_the_border_of_a_chunk():
    for size in (1, 15, 16, 32, 40):
        chunks = range(0, 10 * size * 16, size)
        seen = {len({position // 16 for position in range(at, at + size)}) for at in chunks}
        assert blocks_held(Chunk(size), 10_000, 16) == max(seen), size
    assert blocks_held(Chunk(1024), 33, 16) == 3


@pytest.mark.parametrize("window", [1, 2, 16, 17, 33, Chunk(1), Chunk(16), Chunk(20), Chunk(64)])
def test_a_block_is_read_until_its_last_token_is_seen_no_more(window):
    group = CacheGroup(window=window, num_blocks=99, max_blocks_per_request=99)
    for num_tokens in range(200):
        first = group.first_block(num_tokens, 16)
        if isinstance(window, Chunk):
            seen = num_tokens - num_tokens % window.size
        else:
            seen = max(num_tokens - window + 1, 0)
        assert first == seen // 16
        until = group.last_read(first, 16)
        assert group.first_block(until - 1, 16) == first < group.first_block(until, 16)


def test_groups_with_windows_and_chunks_are_told_apart():
    windows = group_windows([Chunk(32), 16, None, 32, Chunk(32)])
    assert windows == (None, Chunk(32), 32, 16)
    groups = [CacheGroup(window=w, num_blocks=2, max_blocks_per_request=2) for w in windows[:3]]
    assert describe_groups(groups, 16) == (
        "2 blocks of 16 = 32 tokens, 2 blocks of 16 = 32 tokens for chunks of 32, "
        "2 blocks of 16 = 32 tokens for windows of 32"
    )


def test_room_is_told_for_short_and_long_requests():
    assert shown_lengths(32_768) == [512, 4096, 32_768]
    assert shown_lengths(2048) == [512, 2048]
    text = describe_room(lambda length: 100_000 // length, [512, 4096, 512])
    assert text == "24 requests of 4096 tokens, 195 of 512"
