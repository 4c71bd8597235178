"""Takes states through rows of several tokens on Hopper GPUs: prompts, their chunks, and rows with
drafts.

A warpgroup has a part of a head's matrix in registers, from the first token of a row to the last
one. So a state is read once and written once for each row, whatever its length. Tokens are computed
one after the other. Nothing is prepared, and no token beyond a row's end is computed.

Sums over a state have the same order wherever a row is cut into chunks, unless a chunk is a single
token: that is a decode, whose kernel adds in another order. XLA sums the products of a token's keys
and queries, and may choose an order for each number of tokens of a step.

The grid is persistent. An item is a row, a head and a part of its matrix, and items of the longest
rows are the first. Operands of the next tokens are on their way while a piece of a row is computed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.compat import store_unoptimized
from jaxllm_kernels.recurrent.gpu_parts import work_of_rows
from jaxllm_kernels.recurrent.rows import StateRows

# Pieces of a row that are in memory: one is computed, one is loaded.
_STAGES = 2
# The most tokens of a piece, and bytes of what is loaded of them: four thread blocks share the
# memory of a multiprocessor.
_PIECE_TOKENS, _PIECE_BYTES = 16, 27 << 10
# A copy goes to a multiple of 128 bytes, and no operand has less than 16 of a token.
_ALIGNED_TOKENS = 8


class Operand(NamedTuple):
    """What an op has of its tokens: an array [T, heads, numbers]. Several heads of the state can
    share a head."""

    array: jax.Array
    is_cut: bool = False  # whether a part has its own numbers, and not all of them


# The part of a matrix before a token, and of each operand what belongs to part and token, in shared
# memory, to the part after the token and its outputs.
Advance = Callable[..., tuple[Any, Any]]


def run_rows(
    advance: Advance,
    operands: Sequence[Operand],
    out: jax.Array,
    state: jax.Array,
    rows: StateRows,
    *,
    layout: Any,
    part: tuple[int, int],
    axis: int,
    num_workers: int,
    interpret: Any,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """Compute the rows that are no decodes; return the outputs and the states, updated in place.

    Args:
      out: float32 [T, N, numbers], of which a part has its own.
      state: float32 [S, N, rows, columns].
      layout: how a part lies in registers.
      part: the sizes of a part: whole columns, or whole rows.
      axis: along which of its axes a matrix is cut into parts, and outputs and operands with it.
    """
    num_tokens = len(out)
    num_slots, num_heads, *matrix = state.shape
    num_own = part[axis]
    num_parts = matrix[axis] // num_own
    has_drafts = rows.drafts is not None
    sizes = [num_own if x.is_cut else x.array.shape[2] for x in operands]
    itemsizes = [x.array.dtype.itemsize for x in operands]
    token_bytes = sum(size * itemsize for size, itemsize in zip(sizes, itemsizes, strict=True))
    most = min(_PIECE_TOKENS, _PIECE_BYTES // token_bytes) // _ALIGNED_TOKENS * _ALIGNED_TOKENS
    piece = min(num_tokens, most)
    room = pl.cdiv(piece, _ALIGNED_TOKENS) * _ALIGNED_TOKENS

    def kernel(work_ref, operand_refs, out_ref, state_ref, *, staged, loaded):
        def run_item(i, _):
            item = lax.axis_index("worker") + i * num_workers
            of_head, own = lax.div(item, jnp.int32(num_parts)), lax.rem(item, jnp.int32(num_parts))
            row, head = (
                lax.div(of_head, jnp.int32(num_heads)),
                lax.rem(of_head, jnp.int32(num_heads)),
            )
            own = pl.ds(pl.multiple_of(own * num_own, num_own), num_own)
            first, length = work_ref.first[row], work_ref.length[row]
            matrix_ref = state_ref.at[(work_ref.slot[row], head, *[slice(None)] * axis, own)]

            def send(number):
                stage = lax.rem(number, jnp.int32(_STAGES))
                # A copy makes zeros of what is past the last token.
                tokens = pl.ds(first + number * piece, piece)
                for operand, source, target in zip(operands, operand_refs, staged, strict=True):
                    sharing = num_heads // operand.array.shape[1]
                    source = source.at[tokens, lax.div(head, jnp.int32(sharing))]
                    source = source.at[:, own] if operand.is_cut else source
                    plgpu.copy_gmem_to_smem(source, target.at[stage, :piece], loaded.at[stage])

            def run_piece(number, held):
                # All warps have read the piece before, whose memory the next one takes.
                plgpu.commit_smem()
                pl.when((number + 1) * piece < length)(lambda: send(number + 1))
                stage = lax.rem(number, jnp.int32(_STAGES))
                plgpu.barrier_wait(loaded.at[stage])
                token = first + number * piece

                def run_token(j, held):
                    held, y = advance(held, *(x.at[stage, j] for x in staged))
                    store_unoptimized(out_ref.at[token + j, head, own], y)
                    if has_drafts:
                        is_kept = number * piece + j + 1 == work_ref.num_kept[row]
                        pl.when(is_kept)(lambda: store_unoptimized(matrix_ref, held))
                    return held

                tokens = jnp.minimum(length - number * piece, piece)
                return lax.fori_loop(jnp.int32(0), tokens, run_token, held)

            # The last piece of the item before has been read.
            plgpu.commit_smem()
            send(jnp.int32(0))
            held = plgpu.load(matrix_ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
            # A select also replaces NaN.
            held = jnp.where(jnp.full(part, work_ref.begins[row] > 0), 0.0, held)
            num_pieces = lax.div(length + piece - 1, jnp.int32(piece))
            held = lax.fori_loop(jnp.int32(0), num_pieces, run_piece, held)
            if not has_drafts:
                store_unoptimized(matrix_ref, held)

        num_items = work_ref.num_rows[0] * (num_heads * num_parts)
        ahead = num_items - lax.axis_index("worker") + num_workers - 1
        lax.fori_loop(jnp.int32(0), lax.div(ahead, jnp.int32(num_workers)), run_item, None)

    states, outputs = jax.new_ref(state), jax.new_ref(out)
    staged = [
        plgpu.SMEM((_STAGES, room, size), x.array.dtype)
        for size, x in zip(sizes, operands, strict=True)
    ]
    plgpu.kernel(
        kernel,
        out_type=(),
        grid=(num_workers,),
        grid_names=("worker",),
        scratch_types=dict(
            staged=staged,
            loaded=plgpu.Barrier(num_arrivals=len(staged), num_barriers=_STAGES),
        ),
        # Sums are within warps, which needs no scratch. Nor do warps wait for each other at stores,
        # which no other thread reads; whoever loads waits for all of them.
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name=name,
    )(work_of_rows(rows, num_slots), [x.array for x in operands], outputs, states)
    return jax.freeze(outputs), jax.freeze(states)
