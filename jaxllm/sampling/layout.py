"""How each platform likes to read logits: the only choice of the sampler that depends on it.

All layouts compute the same. A block is 128 neighbouring tokens of the vocabulary, whatever
the size of the vocabulary or of a device's shard of it (a shard is a number of whole blocks).

- CPU: one op in C++ chooses the tokens, where it can (`op`). XLA has rows cut into blocks,
  [R, blocks, 128]: its own arg-max of a row takes three times as long as one of its blocks' maxima.
  A few rows at a time stay in the caches.
- GPU: rows cut into blocks are the same memory. An arg-max of whole rows is fewer launches. On
  Hopper one launch finds the cuts of top-k and top-p, but of rows that are whole on a device.
- TPU: memory consists of tiles of eight rows by 128 tokens, so blocks of a row are apart, and
  [R, blocks, 128] would be a copy of all logits. Reductions over the tiles need none. A gather
  of whole rows copies the table first; a product with the table does not. Compiled for a v6e,
  most temporaries of 32 rows are in VMEM, and those of 64 are not.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxllm_kernels.common import round_up
from jaxllm_kernels.row_sums.api import RowSums
from jaxllm_kernels.sampler.api import Sampler
from jaxllm_kernels.top_k_cut.api import top_k_top_p_min_p_cut

BLOCK = 128
_SUBLANES = 8  # rows of a tile of a TPU's memory
_NO_TOKEN = jnp.iinfo(jnp.int32).max


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Operations on rows of the vocabulary, f32 [R, V].

    The text of a layout is part of the identity of programs. It has the name and the numbers, and
    not the functions, whose text differs from process to process.
    """

    name: str
    # The column of each row's largest value, the first of equals, i32 [R], and the value. NaN
    # counts as +inf.
    arg_max: Callable[[jax.Array], tuple[jax.Array, jax.Array]] = field(repr=False)
    # The sum of each block, f32 [R, blocks].
    block_sums: Callable[[jax.Array], jax.Array] = field(repr=False)
    # One block of each row, i32 [R], of values >= 0: f32 [R, BLOCK].
    block_of: Callable[[jax.Array, jax.Array], jax.Array] = field(repr=False)
    # The entries of slots, i32 [R], in a table i16 [S, V]: integers [R, V]. A slot out of range
    # gets any.
    entries: Callable[[jax.Array, jax.Array], jax.Array] = field(repr=False)
    # The lowest p that a row may sample, by its top-k, top-p and min-p (`top_k_cut.api`).
    cut: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array] = field(repr=False)
    # The sum of each row, f32 [R].
    row_sums: Callable[[jax.Array], jax.Array] = field(repr=False)
    # How many rows are adjusted, drawn from and given logprobs at a time. Bounds the temporaries.
    max_rows: int
    # The most columns of one XLA `top_k`.
    max_top_k_columns: int
    # What chooses tokens, counts them, and computes logprobs in place of all this; None: XLA.
    op: Sampler | None = None


def _block_arg_max(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    blocks = _blocks(x, fill=-jnp.inf)
    largest = jnp.max(jnp.where(blocks < jnp.inf, blocks, jnp.inf), axis=2)
    block = jnp.argmax(largest, axis=1)
    place = jnp.argmax(_chosen_block(blocks, block), axis=1)
    # A lookup, because XLA would turn a maximum of maxima into one that reads all values again.
    value = jnp.take_along_axis(largest, block[:, None], axis=1)[:, 0]
    return (block * BLOCK + place).astype(jnp.int32), value


def _one_pass_arg_max(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Column and value in one reduction. `jnp.argmax` has no value to return, and for a TPU a
    second reduction for it would read all logits again."""

    def better(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        is_first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(is_first, a[0], b[0]), jnp.where(is_first, a[1], b[1])

    columns = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    values = jnp.where(x < jnp.inf, x, jnp.inf)
    worst = jnp.float32(-jnp.inf), jnp.int32(_NO_TOKEN)
    value, column = jax.lax.reduce((values, columns), worst, better, (1,))
    return column, value


def _block_sums(x: jax.Array) -> jax.Array:
    return jnp.sum(_blocks(x, fill=0), axis=2)


def _row_sums(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1)


def _block_of(x: jax.Array, block: jax.Array) -> jax.Array:
    return _chosen_block(_blocks(x, fill=0), block)


def _chosen_block(blocks: jax.Array, block: jax.Array) -> jax.Array:
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _blocks(x: jax.Array, fill: float) -> jax.Array:
    """Cut rows f32 [R, V] into blocks, f32 [R, V / BLOCK rounded up, BLOCK]."""
    return _pad(x, fill).reshape(len(x), -1, BLOCK)


def _pad(x: jax.Array, fill: float) -> jax.Array:
    padding = round_up(x.shape[1], BLOCK) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill) if padding else x


def _gather(table: jax.Array, slots: jax.Array) -> jax.Array:
    return table.at[slots].get(mode="clip")


def _tile_sums(x: jax.Array) -> jax.Array:
    return jnp.sum(_tiles(x), axis=3).swapaxes(1, 2).reshape(len(x), -1)


def _tile_of(x: jax.Array, block: jax.Array) -> jax.Array:
    tiles = _tiles(x)
    # Behind the barrier, the block's number is in all lanes. Otherwise XLA would compare before it
    # broadcasts, and broadcast all comparisons.
    wanted = jax.lax.optimization_barrier(jnp.broadcast_to(block[:, None], (len(x), BLOCK)))
    wanted = wanted.reshape(len(tiles), 1, -1, BLOCK)
    number = jax.lax.broadcasted_iota(jnp.int32, tiles.shape, 1)
    return jnp.max(jnp.where(number == wanted, tiles, 0), axis=1).reshape(-1, BLOCK)


def _tiles(x: jax.Array) -> jax.Array:
    """See rows f32 [R, V] as tiles, f32 [R / rows, V / BLOCK, rows, BLOCK]: the order of a TPU's
    memory if rows is 8, so that nothing is moved."""
    rows = math.gcd(len(x), _SUBLANES)
    return _pad(x, 0).reshape(len(x) // rows, rows, -1, BLOCK).swapaxes(1, 2)


def _entries_by_product(table: jax.Array, slots: jax.Array) -> jax.Array:
    """Entries as products of rows of zeros and a one with the table's bytes: exact, i32."""
    chosen = (slots[:, None] == jnp.arange(len(table))).astype(jnp.bfloat16)
    words = table.astype(jnp.int32)

    def entries(part: jax.Array) -> jax.Array:
        return jnp.dot(chosen, part.astype(jnp.bfloat16), preferred_element_type=jnp.float32)

    return (entries(words & 0xFF) + 256 * entries(words >> 8)).astype(jnp.int32)


def _cut_in_one_launch(*operands: jax.Array) -> jax.Array:
    # Importing Mosaic takes long, and not every JAX has it.
    from jaxllm_kernels.top_k_cut.gpu import top_k_top_p_min_p_cut

    return top_k_top_p_min_p_cut(*operands)


LAYOUTS = {
    "cpu": Layout(
        name="cpu",
        arg_max=_block_arg_max,
        block_sums=_block_sums,
        row_sums=_row_sums,
        block_of=_block_of,
        entries=_gather,
        cut=top_k_top_p_min_p_cut,
        max_rows=8,
        max_top_k_columns=1 << 31,
    ),
    "gpu": Layout(
        name="gpu",
        arg_max=_one_pass_arg_max,
        block_sums=_block_sums,
        row_sums=_row_sums,
        block_of=_block_of,
        entries=_gather,
        cut=top_k_top_p_min_p_cut,
        max_rows=1 << 31,  # there is room, and a loop would be more launches
        max_top_k_columns=128,
    ),
    "tpu": Layout(
        name="tpu",
        arg_max=_one_pass_arg_max,
        block_sums=_tile_sums,
        row_sums=_row_sums,
        block_of=_tile_of,
        entries=_entries_by_product,
        cut=top_k_top_p_min_p_cut,
        max_rows=32,
        max_top_k_columns=128,
    ),
}
# Of a plan, not of a platform: it runs only there, and JAX must have Mosaic for GPUs.
HOPPER = replace(LAYOUTS["gpu"], name="hopper", cut=_cut_in_one_launch)


def with_row_sums(layout: Layout, sums: RowSums) -> Layout:
    """The layout with sums whose order does not depend on the number of rows."""
    return replace(
        layout,
        name=f"{layout.name} with sums in a fixed order",
        row_sums=sums.total,
        block_sums=lambda x: sums.total(_blocks(x, fill=0)),
        cut=functools.partial(top_k_top_p_min_p_cut, row_sums=sums.total),
    )


def with_op(layout: Layout, op: Sampler) -> Layout:
    """The layout with an op that chooses the tokens of rows without users' processors."""
    return replace(layout, name=f"{layout.name} with an op", op=op)
