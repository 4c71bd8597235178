"""The implementation for Hopper GPUs, in Pallas Mosaic GPU kernels.

Two kernels compute disjoint rows of the flat batch. One is for decodes and short rows, and splits
their keys over the chip (`gpu_decode`). The other is for longer prefill chunks and keeps the tensor
cores busy (`gpu_prefill`). Their worklists are computed once per step (`gpu_worklist`).

Before them, one kernel rotates and writes the keys and values, and lays out the queries
(`gpu_place`). For the layers that it does not support XLA does all of that, in several launches.
The cache is updated in place either way, if it is donated.

The kernels' modules are imported only when they are traced: importing Mosaic takes long, and Mosaic
changes with every version of JAX (`compat`).
"""

import dataclasses
import functools
import logging
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.compat import (
    gpu_interpret_params,
    what_slows_mosaic_gpu,
    why_no_mosaic_gpu,
)
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    BatchLimits,
    KVScales,
    RaggedBatch,
    check_common,
    check_is_usual,
    locate_tokens,
    without_short_rows_that_see_ahead,
)
from jaxllm_kernels.ragged_paged_attention.gpu_softmax import HeadScalars, head_scalars
from jaxllm_kernels.ragged_paged_attention.gpu_tuning import (
    PREFILL_TILE_TOKENS,
    Tuning,
    choose_tuning,
    log_untuned,
    num_short_parts,
)
from jaxllm_kernels.ragged_paged_attention.gpu_worklist import (
    DecodeSplit,
    DecodeWork,
    PrefillTiles,
    cut_prefills,
    split_decodes,
)
from jaxllm_kernels.ragged_paged_attention.pages import HEAD_AXIS, to_cached, write_blocks

logger = logging.getLogger(__name__)

_HEAD_SIZES = (64, 80, 96, 128, 256)
_BLOCK_SIZES = (16, 32, 64, 128)
_MAX_GROUP_SIZE = 32


class Prepared(NamedTuple):
    """The values that the layers of a step share."""

    positions: jax.Array  # int32 [T]
    write_blocks: jax.Array  # int32 [T]
    decodes: dict[DecodeSplit, DecodeWork]
    prefills: PrefillTiles | None  # None if the batch is decode_only


@dataclass(frozen=True)
class MosaicGpuBackend:
    """Attention by Mosaic GPU kernels for Hopper (sm_90)."""

    sees_ahead: ClassVar[Literal[True]] = True
    name: str = "mosaic_sm90"
    # The chip whose measured tunings apply.
    chip: str = "h200"
    # Thread blocks of the persistent kernels: the multiprocessors of an H100 or H200 (SXM).
    num_workers: int = 132
    # Emulate the kernels on a CPU, with a race detector: for tests.
    interpret: bool = False

    @property
    def cache_head_axis(self) -> int:
        return HEAD_AXIS

    def tuned_for(self, chip: Chip) -> "MosaicGpuBackend":
        """Use one thread block for each multiprocessor, if the chip's number is known."""
        if self.interpret or chip.num_cores == 1:
            return self
        return dataclasses.replace(self, chip=chip.name, num_workers=chip.num_cores)

    def check(
        self, config: AttentionConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        check_common(config, limits, dtype=dtype)
        check_is_usual(config)

        def refuse(why: str, change: str = "set --attention-backend xla"):
            raise ValueError(f"attention backend {self.name} {why}; {change}")

        # Check the chip first: another version of JAX would not help an A100.
        if not (self.interpret or chip.is_hopper):
            refuse(f"runs on Hopper GPUs (compute capability 9.0), not on {chip.name}")
        if why := why_no_mosaic_gpu():
            refuse(why)
        if jnp.dtype(dtype).itemsize != 2:
            refuse(
                f"computes in 16 bits, not in {jnp.dtype(dtype).name}",
                "set --dtype bfloat16 or float16, or --attention-backend xla",
            )
        if config.head_size not in _HEAD_SIZES:
            refuse(f"supports head sizes {_HEAD_SIZES}, not {config.head_size}")
        if limits.block_size not in _BLOCK_SIZES:
            refuse(
                f"supports blocks of {_BLOCK_SIZES} tokens, not {limits.block_size}",
                "set --block-size to one of them, or --attention-backend xla",
            )
        if config.num_heads // config.num_kv_heads > _MAX_GROUP_SIZE:
            refuse(
                f"supports up to {_MAX_GROUP_SIZE} query heads per kv head, "
                f"not {config.num_heads // config.num_kv_heads}"
            )
        log_untuned(config, self.tuned_for(chip).chip)
        if not self.interpret and (why := what_slows_mosaic_gpu()):
            _warn_once(f"attention backend {self.name}: {why}")

    def cache_shape(
        self, config: AttentionConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        """The keys, or the values, of a page and kv head are contiguous: one TMA copy."""
        return jax.ShapeDtypeStruct(
            (num_blocks, 2, config.num_kv_heads, block_size, config.head_size),
            config.kv_dtype or dtype,
        )

    def prepare(
        self, batch: RaggedBatch, configs: tuple[AttentionConfig, ...], *, num_tokens: int
    ) -> Prepared:
        places = locate_tokens(batch, num_tokens)
        batch = without_short_rows_that_see_ahead(batch, num_tokens)
        splits = {self._decode_split(config, batch) for config in configs}
        decodes = {split: split_decodes(batch, split) for split in splits}
        prefills = None
        if not batch.decode_only:
            prefills = cut_prefills(batch, num_tokens=num_tokens, tile_tokens=PREFILL_TILE_TOKENS)
        return Prepared(places.positions, write_blocks(batch, places), decodes, prefills)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Prepared,
        *,
        config: AttentionConfig,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        from jaxllm_kernels.ragged_paged_attention.gpu_decode import group_heads

        new = jnp.stack(to_cached(k, v, config, kv_scales), axis=1)  # [T, 2, K, H]
        slots = prepared.positions % batch.block_size
        cache = cache.at[prepared.write_blocks, :, :, slots].set(new, mode="drop")

        # The kernels write to disjoint rows of one array; the rows that neither writes are padding.
        zero = jnp.zeros((), q.dtype)
        if not batch.decode_only:
            # XLA creates the equal constants of all layers in one launch and keeps them until they
            # are used: 64 MiB per layer for 8192 tokens of 32 heads of 128. So each constant
            # depends on its query.
            zero = jnp.minimum(jnp.abs(q[0, 0, 0]), zero)
        out = jnp.broadcast_to(zero, q.shape)
        grouped = group_heads(q[: _num_decode_rows(batch, len(q))], config)
        queries = None
        if not batch.decode_only:
            # A tile, or a short row's queries, may extend past the last token.
            queries = jnp.pad(q, ((0, PREFILL_TILE_TOKENS - 1), (0, 0), (0, 0)))
        scalars = head_scalars(sinks, kv_scales)
        return self._attend(grouped, queries, out, cache, batch, prepared, scalars, config), cache

    def takes_heads(self, config: AttentionConfig, rotary_size: int | None) -> bool:
        from jaxllm_kernels.ragged_paged_attention.gpu_place import can_place

        return can_place(config, rotary_size)

    def attend_heads(
        self,
        heads: jax.Array,
        rotary: tuple[jax.Array, jax.Array] | None,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Prepared,
        *,
        config: AttentionConfig,
    ) -> tuple[jax.Array, jax.Array]:
        from jaxllm_kernels.ragged_paged_attention.gpu_place import place

        placed = place(
            heads,
            rotary,
            cache,
            prepared.write_blocks,
            prepared.positions,
            config=config,
            num_rows=_num_decode_rows(batch, len(heads)),
            decode_only=batch.decode_only,
            interpret=self._interpret_params(),
        )
        scalars = head_scalars(None, None)
        grouped, queries, out, cache = placed
        return self._attend(grouped, queries, out, cache, batch, prepared, scalars, config), cache

    def _attend(
        self,
        grouped: jax.Array,
        queries: jax.Array | None,
        initial: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Prepared,
        scalars: HeadScalars,
        config: AttentionConfig,
    ) -> jax.Array:
        """Write the outputs of all rows over an array with those of padding."""
        out = jax.new_ref(initial)
        self._decode(grouped, queries, cache, batch, prepared, scalars, out, config)
        if prepared.prefills is not None:
            assert queries is not None
            self._prefill(queries, cache, batch, prepared.prefills, scalars, out, config)
        return jax.freeze(out)

    # The seam for other generations: A100 and L4 would need kernels on mma.sync, B200 on tcgen05.
    # These would be other modules with the two functions imported below, chosen by a field of the
    # backend. The rest of this file would not change.

    def _decode(
        self,
        grouped: jax.Array,
        q: jax.Array | None,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Prepared,
        scalars: HeadScalars,
        out: jax.Ref,
        config: AttentionConfig,
    ) -> None:
        from jaxllm_kernels.ragged_paged_attention.gpu_decode import decode

        split = self._decode_split(config, batch)
        decode(
            grouped,
            q,
            cache,
            batch.block_tables,
            prepared.decodes[split],
            scalars,
            out,
            config=config,
            split=split,
            tuning=self._decode_tuning(config, batch),
            interpret=self._interpret_params(),
        )

    def _prefill(
        self,
        q: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        tiles: PrefillTiles,
        scalars: HeadScalars,
        out: jax.Ref,
        config: AttentionConfig,
    ) -> None:
        from jaxllm_kernels.ragged_paged_attention.gpu_prefill import prefill

        prefill(
            q,
            cache,
            batch.block_tables,
            tiles,
            scalars,
            out,
            config=config,
            num_workers=self.num_workers,
            tuning=choose_tuning("prefill", config, self.chip),
            interpret=self._interpret_params(),
        )

    def _decode_tuning(self, config: AttentionConfig, batch: RaggedBatch) -> Tuning:
        kernel = "decode" if batch.decode_only else "decode_with_short_rows"
        return choose_tuning(kernel, config, self.chip)

    def _decode_split(self, config: AttentionConfig, batch: RaggedBatch) -> DecodeSplit:
        block_tokens = self._decode_tuning(config, batch).block_tokens
        return DecodeSplit(
            num_kv_heads=config.num_kv_heads,
            short_parts=1 if batch.decode_only else num_short_parts(config),
            sliding_window=config.sliding_window,
            block_tokens=block_tokens,
            load_tokens=min(batch.block_size, block_tokens),
            num_workers=self.num_workers,
        )

    def _interpret_params(self):
        return gpu_interpret_params() if self.interpret else False


def _num_decode_rows(batch: RaggedBatch, num_tokens: int) -> int:
    """How many rows may be decodes; a decode's token has the index of its row."""
    return min(batch.context_lens.shape[0], num_tokens)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
