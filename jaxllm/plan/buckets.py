"""The few shapes of steps.

A *decode* step has one token per row, and its rows are padded to powers of two. A *mixed* step is a
flat ragged batch: its tokens are padded to powers of two, and its rows follow from the tokens. An
engine that speculates has a few more mixed steps, for rows with drafts. So the number of programs
is the sum of short ladders and never a product. Where padding costs next to nothing some rungs are
left out, since each is a program to compile.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxllm_kernels.common import cdiv

from jaxllm.speculative_config import Speculation


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """The static shape of one program."""

    decode_only: bool
    num_tokens: int
    num_rows: int
    max_block_updates: int  # block-table changes that travel with the step
    # Whether rows may have adapters. Steps in which no row has one run in the other program of the
    # same shape, which is that of an engine without adapters.
    has_adapters: bool = False

    def __str__(self) -> str:
        kind = "decode" if self.decode_only else "mixed"
        adapters = " with adapters" if self.has_adapters else ""
        return f"{kind} {self.num_tokens}x{self.num_rows}{adapters}"


def make_ladder(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    min_rows: int,
    num_cache_groups: int = 1,
    free_padding: int = 0,
    speculation: Speculation | None = None,
    has_decodes: bool = True,
) -> tuple[Bucket, ...]:
    """Make all buckets of an engine: decode steps before mixed steps, each from small to large. An
    engine that pools has no decode steps.

    No bucket has fewer rows than `min_rows`. Up to `free_padding` tokens, products skip padding: it
    costs time only in the sampler and between products.
    """
    decode = [
        Bucket(
            decode_only=True,
            num_tokens=rows,
            num_rows=rows,
            max_block_updates=rows * num_cache_groups,
        )
        for rows in _powers_of_two(min_rows, max_num_seqs)
        if has_decodes and (rows >= min(free_padding, max_num_seqs) or rows in _POWERS_OF_FOUR)
    ]
    mixed = [
        Bucket(
            decode_only=False,
            num_tokens=tokens,
            # A row has at least one token.
            num_rows=max(min_rows, min(max_num_seqs, tokens)),
            max_block_updates=num_cache_groups
            * (cdiv(tokens, block_size) + min(max_num_seqs, tokens)),
        )
        for tokens in _powers_of_two(_MIN_MIXED_TOKENS, max_num_batched_tokens)
        if tokens >= min(free_padding, max_num_batched_tokens)
    ]
    if speculation is not None:
        verify = _verify_buckets(speculation, min_rows, block_size, num_cache_groups)
        shapes = {(bucket.num_tokens, bucket.num_rows) for bucket in mixed}
        mixed += [
            bucket
            for bucket in verify
            if bucket.num_tokens < max_num_batched_tokens
            and (bucket.num_tokens, bucket.num_rows) not in shapes
        ]
        mixed.sort()
    return (*decode, *mixed)


def with_adapters(ladder: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Add the variant of each bucket whose rows may have adapters."""
    plain = tuple(ladder)
    return plain + tuple(replace(bucket, has_adapters=True) for bucket in plain)


def _verify_buckets(
    speculation: Speculation, min_rows: int, block_size: int, num_cache_groups: int
) -> list[Bucket]:
    """Mixed steps of nothing but rows with drafts, so that these are padded little."""
    width = 1 + speculation.num_drafts
    numbers = {rows for rows in (1, *_POWERS_OF_FOUR) if rows < speculation.max_rows}
    return [
        Bucket(
            decode_only=False,
            num_tokens=rows * width,
            num_rows=rows,
            max_block_updates=num_cache_groups * rows * (1 + cdiv(width, block_size)),
        )
        # Products have at least as many rows as these have tokens.
        for rows in {max(cdiv(min_rows, width), rows) for rows in (*numbers, speculation.max_rows)}
    ]


class BucketTable:
    """Finds the smallest bucket that holds a step."""

    def __init__(self, ladder: tuple[Bucket, ...]):
        self._kinds: dict[tuple[bool, bool], list[Bucket]] = {}
        for bucket in sorted(ladder):
            kind = bucket.decode_only, bucket.has_adapters
            self._kinds.setdefault(kind, []).append(bucket)

    def find(
        self, *, num_tokens: int, num_rows: int, decode_only: bool, has_adapters: bool = False
    ) -> Bucket:
        for bucket in self._kinds.get((decode_only, has_adapters), ()):
            if bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows:
                return bucket
        raise AssertionError(f"no bucket for {num_tokens} tokens in {num_rows} rows")


_MIN_MIXED_TOKENS = 16
_POWERS_OF_FOUR = {4**i for i in range(1, 10)}


def _powers_of_two(low: int, high: int) -> list[int]:
    """low, 2*low, ... up to the first number that is at least `high`, which becomes `high`."""
    sizes = [low]
    while sizes[-1] < high:
        sizes.append(min(sizes[-1] * 2, high))
    return sizes
