import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.plan.buckets import BucketTable, make_ladder
from jaxllm.speculative_config import Speculation


def speculation(num_drafts, max_rows):
    return Speculation(
        method="ngram",
        num_drafts=num_drafts,
        min_lookup=2,
        max_lookup=4,
        drafts_by_requests=(num_drafts,) * max_rows,
    )


def ladder(**sizes):
    defaults = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
        "min_rows": 2,
    }
    return make_ladder(**{**defaults, **sizes})


def test_default_sizes_make_few_programs():
    assert [str(bucket) for bucket in ladder(max_num_seqs=8, max_num_batched_tokens=64)] == [
        "decode 2x2",
        "decode 4x4",
        "decode 8x8",
        "mixed 16x8",
        "mixed 32x8",
        "mixed 64x8",
    ]
    assert len(ladder(max_num_seqs=256, max_num_batched_tokens=8192)) <= 20


def test_rungs_are_left_out_where_padding_is_free():
    def names(**sizes):
        return [f"{b.num_tokens}{'d' if b.decode_only else 'm'}" for b in ladder(**sizes)]

    sizes = {"max_num_batched_tokens": 512}
    assert names(free_padding=64, **sizes) == "4d 16d 64d 64m 128m 256m 512m".split()
    assert names(free_padding=32, **sizes) == "4d 16d 32d 64d 32m 64m 128m 256m 512m".split()
    assert names(free_padding=64, max_num_seqs=6, **sizes)[:3] == "4d 6d 64m".split()
    assert names(free_padding=64, max_num_seqs=1, max_num_batched_tokens=20) == ["2d", "20m"]
    assert "128d 200d 64m 128m 200m" in " ".join(
        names(free_padding=64, max_num_seqs=200, max_num_batched_tokens=200)
    )


def test_sizes_that_are_no_powers_of_two_are_reached_exactly():
    buckets = ladder(max_num_seqs=48, max_num_batched_tokens=100)
    assert max(b.num_rows for b in buckets if b.decode_only) == 48
    assert max(b.num_tokens for b in buckets if not b.decode_only) == 100


@given(
    max_num_seqs=st.integers(1, 100),
    max_num_batched_tokens=st.integers(100, 5000),
    free_padding=st.sampled_from([0, 32, 64]),
    num_drafts=st.integers(0, 7),
    data=st.data(),
)
def test_every_step_within_the_limits_finds_a_bucket_that_holds_it(
    max_num_seqs, max_num_batched_tokens, free_padding, num_drafts, data
):
    buckets = BucketTable(
        ladder(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            free_padding=free_padding,
            speculation=speculation(num_drafts, min(max_num_seqs, 8)) if num_drafts else None,
        )
    )
    rows = data.draw(st.integers(1, max_num_seqs))
    tokens = data.draw(st.integers(rows, max_num_batched_tokens))
    mixed = buckets.find(num_tokens=tokens, num_rows=rows, decode_only=False)
    assert mixed.num_tokens >= tokens and mixed.num_rows >= rows
    assert mixed.num_tokens < 2 * max(tokens, 16, free_padding)
    decode = buckets.find(num_tokens=rows, num_rows=rows, decode_only=True)
    assert decode.num_tokens == decode.num_rows >= rows
    most = 2 * rows if rows > free_padding else min(4 * rows, free_padding)
    assert decode.num_rows <= max(most, 2)


@pytest.mark.parametrize("num_drafts", [1, 3, 4, 7])
@pytest.mark.parametrize("free_padding", [0, 64])
def test_rows_with_drafts_are_padded_little(num_drafts, free_padding):
    buckets = BucketTable(
        ladder(
            max_num_seqs=32,
            max_num_batched_tokens=512,
            free_padding=free_padding,
            speculation=speculation(num_drafts, max_rows=8),
        )
    )
    for rows in range(1, 9):
        tokens = rows * (1 + num_drafts)
        bucket = buckets.find(num_tokens=tokens, num_rows=rows, decode_only=False)
        if free_padding:  # without it, other mixed steps may have fewer tokens
            assert bucket.num_rows == (1 if rows == 1 else 4 if rows <= 4 else 8)
        assert bucket.num_tokens <= 2 * tokens


def test_room_for_block_updates_covers_a_step_without_cached_prefixes():
    for bucket in ladder(max_num_seqs=8, max_num_batched_tokens=256):
        # Every row may begin a block and end in another.
        most = bucket.num_rows if bucket.decode_only else bucket.num_tokens // 16 + bucket.num_rows
        assert bucket.max_block_updates >= most
