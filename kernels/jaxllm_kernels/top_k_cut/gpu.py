"""The cut on Hopper GPUs, in one launch: each thread block searches the cuts of one row.

In XLA a halving is five launches, and all rows wait for the one that needs the most. Here a row has
its own loop. A pass over it weighs three thresholds, which is about as long as the L2 needs to
deliver the row, and quarters the interval. The sums have a fixed order, so a row's cut does not
depend on other rows.

Roofline: passes x rows x vocabulary x 4 bytes from the L2; a row comes through one multiprocessor.
For 64 rows of 152k that is at least 5 us a pass, of which a cut takes 4 to 10. Nothing was
measured.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.common import round_up

_ONE = 0x3F800000  # the bits of 1.0, the largest p
# Tokens that are added up at a time: eight in each thread.
_PIECE = 1024
# Pieces that are loaded before the first is used, which hides the latency.
_PIECES = 8
_LAYOUT = plgpu.Layout.WG_STRIDED((_PIECE,), vec_size=4)


def top_k_top_p_min_p_cut(
    p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    interpret: Any = False,
) -> jax.Array:
    """See `api`."""
    num_rows, vocab_size = p.shape
    size = round_up(vocab_size, _PIECE * _PIECES)
    # Less than every threshold. XLA writes it where it computes p.
    p = jnp.pad(p, ((0, 0), (0, size - vocab_size)), constant_values=-1)
    # abs, because minus zero is also a zero, and its bits would be the lowest of all integers.
    lowest = lax.bitcast_convert_type(jnp.abs(min_p), jnp.int32)

    def kernel(p_ref, top_k_ref, top_p_ref, lowest_ref, cut_ref):
        row = lax.axis_index("row")

        def weigh(thresholds: tuple[Any, ...], value_of):
            """The sums of the values of all tokens at or above each threshold."""

            def add_pieces(i, sums):
                starts = [(i * _PIECES + j) * _PIECE for j in range(_PIECES)]
                pieces = [
                    plgpu.load(  # pyright: ignore[reportCallIssue]
                        p_ref.at[row, pl.ds(pl.multiple_of(start, _PIECE), _PIECE)], layout=_LAYOUT
                    )
                    for start in starts
                ]
                for piece in pieces:
                    bits, values = lax.bitcast_convert_type(piece, jnp.int32), value_of(piece)
                    sums = tuple(
                        total + jnp.where(bits >= threshold, values, 0.0)
                        for total, threshold in zip(sums, thresholds, strict=True)
                    )
                return sums

            zeros = plgpu.layout_cast(jnp.zeros(_PIECE, jnp.float32), _LAYOUT)
            count = jnp.int32(size // (_PIECE * _PIECES))
            sums = lax.fori_loop(jnp.int32(0), count, add_pieces, (zeros,) * len(thresholds))
            return [total.sum() for total in sums]

        def search(low, value_of, wanted_of, least_of):
            """Raise `low` as far as the tokens at or above it weigh what is wanted."""
            (weight,) = weigh((low,), value_of)
            wanted = wanted_of(weight)

            def is_open(state):
                low, high, weight = state
                return (high - low > 1) & (weight - wanted >= least_of(low))

            def quarter(state):
                low, high, weight = state
                whole, rest = lax.div(high - low, jnp.int32(4)), lax.rem(high - low, jnp.int32(4))
                cuts = tuple(low + whole * i + lax.div(rest * i, jnp.int32(4)) for i in (1, 2, 3))
                new_low, new_high = low, cuts[0]
                weights = weigh(cuts, value_of)
                for cut, next_cut, above in zip(cuts, (*cuts[1:], high), weights, strict=True):
                    enough = above >= wanted
                    new_low = jnp.where(enough, cut, new_low)
                    new_high = jnp.where(enough, next_cut, new_high)
                    weight = jnp.where(enough, above, weight)
                return new_low, new_high, weight

            return lax.while_loop(is_open, quarter, (low, jnp.int32(_ONE + 1), weight))[0]

        def cut_to_k(low):
            wanted = top_k_ref[row].astype(jnp.float32)
            return search(low, jnp.ones_like, lambda _: wanted, lambda _: jnp.float32(1))

        def cut_to_share(low):
            share = top_p_ref[row]
            return search(low, lambda p: p, lambda weight: share * weight, _power_below)

        low = lowest_ref[row]
        low = lax.cond(top_k_ref[row] > 0, cut_to_k, lambda low: low, low)
        cut_ref[row] = lax.cond(top_p_ref[row] < 1, cut_to_share, lambda low: low, low)

    cut = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        grid=(num_rows,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name="top_k_cut",
    )(p, top_k, top_p, lowest)
    return lax.bitcast_convert_type(cut, jnp.float32)


def _power_below(bits):
    """A number not above the float of these bits, and not far below, which serves the search."""
    exponent = lax.shift_right_logical(bits, jnp.int32(23))
    # Powers of two may be rounded up a little.
    power = 0.75 * jnp.exp2((exponent - 127).astype(jnp.float32))
    return jnp.where(exponent > 0, power, jnp.float32(0))
