"""Self-attention on Hopper GPUs: tiles of queries walk over the blocks of keys that they see.

An item is 128 queries of the flat batch, of one head: 64 for each of two compute warpgroups, which
take turns as in a prefill (`ragged_paged_attention/gpu_turns.py`). A producer warpgroup loads the
queries, and blocks of keys and values, from the operands as they are. It is ahead of the others:
while they compute an item, those of the next are in flight.

The blocks of an item are those that any of its queries sees (`gpu_tiles.py`). A warpgroup of whose
queries none sees a block only takes its turns. Blocks that all of its queries see completely need
no masks. The others are the first and the last ones: rows, and what is within reach of a query,
begin and end there. So there are three loops over blocks, and two over those that are skipped.

Tiles begin at multiples of 128 tokens, and blocks at multiples of 8, so the copy engine loads and
stores all of them. It fills what lies behind the batch with zeros, and drops outputs there.
Outputs replace the queries in the same memory.

A weight of zero does not remove what is no number, so padding must have numbers. Its outputs are
averages of values that its tile has loaded, or zeros.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.ragged_paged_attention.gpu_blocks import (
    KEYS,
    BlockRing,
    Span,
    operand_transforms,
)
from jaxllm_kernels.ragged_paged_attention.gpu_softmax import LOG2_E, UNSEEN, UNSEEN_PRODUCT
from jaxllm_kernels.ragged_paged_attention.gpu_tuning import GROUP_TOKENS, NUM_GROUPS
from jaxllm_kernels.ragged_paged_attention.gpu_turns import (
    PER_KEY,
    PER_TOKEN,
    REGISTERS,
    Softmax,
    Turns,
    iota,
    over_columns,
    over_rows,
    weights_scratch,
)
from jaxllm_kernels.ragged_paged_attention.gpu_worklist import item_of_worker
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
from jaxllm_kernels.ragged_self_attention.gpu_tiles import ALIGNMENT, Sizes, Tiles


class _Item(NamedTuple):
    """A tile and a query head."""

    token: jax.Array  # the first query
    head: jax.Array
    start: jax.Array  # the first key
    num_blocks: jax.Array


class _Bounds(NamedTuple):
    """What a warpgroup computes of a tile's blocks: see `Tiles`."""

    begin: jax.Array
    whole: jax.Array
    masked: jax.Array
    stop: jax.Array


class _FlatBatch(NamedTuple):
    """The keys and values of all tokens: a `gpu_blocks.Source`."""

    keys: Any  # [T, K, H]
    values: Any

    def look_up(self, ring: BlockRing, span: Span, i) -> None:
        """A block's place needs no look-up."""

    def copy(self, ring: BlockRing, span: Span, which, i, places: None, target, barrier) -> None:
        source = self.keys if which == KEYS else self.values
        token = pl.multiple_of(span.start + i * ring.block_tokens, ALIGNMENT)
        tokens = pl.ds(token, ring.block_tokens)
        plgpu.copy_gmem_to_smem(source.at[tokens, span.head], target, barrier)


def run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: Tiles,
    *,
    sizes: Sizes,
    config: SelfAttentionConfig,
    num_workers: int,
    interpret: Any,
) -> jax.Array:
    """Attend from q [T, N, H] to k and v [T, K, H]; return [T, N, H]. The sizes are multiples of
    those that copies have."""
    _, num_heads, head_size = q.shape
    heads_per_kv_head = num_heads // k.shape[1]
    num_items = len(tiles.token) * num_heads
    num_slots, block_tokens = sizes.num_slots, sizes.block_tokens
    ring = BlockRing(
        block_tokens=block_tokens,
        page_tokens=block_tokens,
        head_size=head_size,
        num_stages=sizes.num_stages,
        num_staged=0,
        num_readers=NUM_GROUPS,
        dtype=q.dtype,
        cache_dtype=q.dtype,
    )
    factor = config.scale * LOG2_E

    def kernel(
        q_ref,
        k_ref,
        v_ref,
        tiles_ref,
        out_ref,
        *,
        blocks,
        queries,
        query_full,
        query_free,
        turn,
        weights=None,
    ):
        group = lax.axis_index("warpgroup")
        turns = Turns(ring=ring, blocks=blocks, turn=turn, group=group, weights=weights)
        worker = lax.axis_index("worker")
        rounds = num_items // num_workers
        has_one_more = item_of_worker(worker, jnp.int32(rounds), num_workers) < num_items
        count = rounds + has_one_more.astype(jnp.int32)

        def find_item(i):
            """The place in the list of tiles, and the head, of an item; some place behind the last.
            Adjacent items are heads of one tile: heads that share a kv head find its keys in L2."""
            item = jnp.minimum(item_of_worker(worker, i, num_workers), num_items - 1)
            return lax.div(item, jnp.int32(num_heads)), lax.rem(item, jnp.int32(num_heads))

        def read_item(i) -> _Item:
            tile, head = find_item(i)
            return _Item(
                tiles_ref.token[tile],
                head,
                tiles_ref.start[tile],
                tiles_ref.num_blocks[tile],
            )

        def read_bounds(i) -> _Bounds:
            tile, _ = find_item(i)
            return _Bounds(*(getattr(tiles_ref, name)[tile, group] for name in _Bounds._fields))

        def rows_of(item, group):
            """The queries of a warpgroup."""
            first_token = pl.multiple_of(item.token + group * GROUP_TOKENS, GROUP_TOKENS)
            return pl.ds(first_token, GROUP_TOKENS)

        def slot_of(i):
            return lax.rem(i, jnp.int32(num_slots))

        def produce():
            plgpu.set_max_registers(REGISTERS[0], action="decrease")

            def begin_item(i) -> Span:
                item, slot = read_item(i), slot_of(i)
                pl.when(i >= num_slots)(lambda: plgpu.barrier_wait(query_free.at[slot]))
                for g in range(NUM_GROUPS):
                    rows = rows_of(item, g)
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[rows, item.head], queries.at[slot, g], query_full.at[slot]
                    )
                kv_head = lax.div(item.head, jnp.int32(heads_per_kv_head))
                end = item.start + item.num_blocks * block_tokens
                return Span(jnp.int32(0), kv_head, item.start, end)

            ring.send_all(count, begin_item, _FlatBatch(k_ref, v_ref), blocks)
            # Whatever has been signalled is waited for.
            for age in range(num_slots, 0, -1):
                pl.when(count >= age)(
                    functools.partial(plgpu.barrier_wait, query_free.at[slot_of(count - age)])
                )

        def load_seen(ref, rows):
            seen = plgpu.load(ref.at[rows], layout=PER_TOKEN, optimized=False)  # pyright: ignore[reportCallIssue]
            return plgpu.layout_cast(seen, PER_TOKEN)

        def compute():
            plgpu.set_max_registers(REGISTERS[1], action="increase")

            def free_queries_before(i):
                """Once the outputs of the item before are stored, other queries have room."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(query_free.at[slot_of(i - 1)]))

            def attend_item(i, carry):
                used, item, bounds = carry
                slot = slot_of(i)
                rows = rows_of(item, group)
                free_queries_before(i)
                first, end = (
                    load_seen(ref, rows) - item.start for ref in (tiles_ref.first, tiles_ref.end)
                )
                num_seen = jnp.maximum(end - first, 0).astype(jnp.uint32)
                plgpu.barrier_wait(query_full.at[slot])

                def attend_block(j, softmax, *, is_masked):
                    def to_scores(products):
                        scores, left = (
                            (products, factor) if factor > 0 else (products * factor, 1.0)
                        )
                        if is_masked:
                            # A comparison without signs is one for both ends.
                            key = over_rows(iota(block_tokens, PER_KEY), GROUP_TOKENS)
                            place = key - over_columns(first - j * block_tokens, block_tokens)
                            seen = place.astype(jnp.uint32) < over_columns(num_seen, block_tokens)
                            scores = jnp.where(seen, scores, UNSEEN_PRODUCT)
                        return scores, left

                    return turns.attend_block(softmax, queries.at[slot, group], used + j, to_scores)

                def attend_blocks(begin, stop, softmax, *, is_masked):
                    body = functools.partial(attend_block, is_masked=is_masked)
                    return lax.fori_loop(begin, stop, body, softmax)

                def skip_blocks(begin, stop):
                    def skip(j, _):
                        turns.skip_block(used + j)

                    lax.fori_loop(begin, stop, skip, None)

                softmax = Softmax.begin(UNSEEN, head_size)
                pl.when(group == 1)(turns.take)
                skip_blocks(jnp.int32(0), bounds.begin)
                softmax = attend_blocks(bounds.begin, bounds.whole, softmax, is_masked=True)
                softmax = attend_blocks(bounds.whole, bounds.masked, softmax, is_masked=False)
                softmax = attend_blocks(bounds.masked, bounds.stop, softmax, is_masked=True)
                skip_blocks(bounds.stop, item.num_blocks)
                pl.when(group == 0)(turns.take)

                # Storing the outputs hides the latency of reading the next item.
                following = read_item(i + 1), read_bounds(i + 1)
                out = softmax.weighted * over_columns(1.0 / softmax.total, head_size)
                queries[slot, group] = out.astype(ring.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(queries.at[slot, group], out_ref.at[rows, item.head])
                return used + item.num_blocks, *following

            carry = jnp.int32(0), read_item(jnp.int32(0)), read_bounds(jnp.int32(0))
            lax.fori_loop(jnp.int32(0), count, attend_item, carry)
            free_queries_before(count)
            plgpu.wait_smem_to_gmem(0)

        pl.when(group < NUM_GROUPS)(compute)
        pl.when(group == NUM_GROUPS)(produce)

    scratch: dict[str, Any] = dict(
        blocks=ring.scratch(),
        queries=plgpu.SMEM(
            (num_slots, NUM_GROUPS, GROUP_TOKENS, head_size),
            q.dtype,
            transforms=operand_transforms(head_size, q.dtype),
        ),
        query_full=plgpu.Barrier(num_arrivals=NUM_GROUPS, num_barriers=num_slots),
        query_free=plgpu.Barrier(num_arrivals=NUM_GROUPS, num_barriers=num_slots),
        turn=plgpu.Barrier(num_arrivals=NUM_GROUPS),
    )
    if interpret:
        scratch["weights"] = weights_scratch(ring)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_workers,),
        grid_names=("worker",),
        num_threads=NUM_GROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Rows of scores are reduced within warps, which needs no scratch.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="ragged_self_attention",
    )(q, k, v, tiles)
