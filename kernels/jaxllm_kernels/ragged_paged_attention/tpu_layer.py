"""The kernels for TPUs of a kind of layer: which of them compute a step, and with which sizes.

There are two: one for decodes and short rows, and one for other prefill chunks. A step that is not
decode_only runs both. Each writes the keys and values of its own rows, and outputs of the second
one are put into those of the first.

Layers with heads of keys and values, and layers with latents, differ in the `TokenLayout`: the
latter are as one kv head whose value is a part of its key.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxllm_kernels.common import round_up
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import (
    SHORT_ROW,
    AttentionConfig,
    BatchLimits,
    RaggedBatch,
    fresh_rows,
    without_short_rows_that_see_ahead,
)
from jaxllm_kernels.ragged_paged_attention.tpu_layout import TokenLayout, sublane_tile
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import (
    KINDS,
    KernelSizes,
    Kind,
    Tuning,
    choose_sizes,
    power_of_two,
    smem_bytes,
    step_tokens,
)
from jaxllm_kernels.ragged_paged_attention.tpu_work import (
    AheadWork,
    ShortWork,
    Work,
    WrittenWork,
    ahead_work,
    decode_work,
    prefill_work,
    short_work,
)


class Prepared(NamedTuple):
    """The values that the layers of a step share: the work of its kernels, by tokens per step; with
    fresh rows also by their fewest tokens."""

    decode: dict[int, Work]
    short: dict[int, ShortWork]
    prefill: dict[tuple[int, int], Work]
    ahead: dict[int, AheadWork]  # empty if each token sees itself last
    fresh: dict[tuple[int, int], WrittenWork]  # empty if no row can be fresh


def check_chip(name: str, chip: Chip, dtype: DTypeLike) -> None:
    """Raise ValueError if no kernel of a backend runs on a chip."""
    if chip.platform != "tpu":
        raise ValueError(
            f"attention backend {name!r} does not run on {chip.name}; "
            "set --attention-backend to xla"
        )
    if not chip.vmem_bytes:
        raise ValueError(
            f"attention backend {name!r} does not know the chip {chip.name!r}; "
            "set --attention-backend to xla"
        )
    if jnp.dtype(dtype) == jnp.float16:
        raise ValueError("TPUs do not compute in float16; set --dtype to bfloat16")


@dataclass(frozen=True, kw_only=True)
class LayerKernels:
    """The kernels of layers with one config."""

    name: str  # of the op
    config: AttentionConfig
    layout: TokenLayout
    chip: Chip
    tunings: Mapping[Kind, Tuning]
    # As in `LatentConfig`: such rows are written by themselves, and their outputs are zero.
    fewest_fresh: int = 0
    # Emulate the kernels on a CPU, with a race detector.
    interpret: bool

    def check(self, limits: BatchLimits, *, dtype: DTypeLike) -> None:
        """Raise ValueError, which says what to change, if the kernels cannot run such batches."""
        cached = jnp.dtype(self.config.kv_dtype or dtype)
        tile = sublane_tile(cached)
        if limits.block_size % tile:
            raise ValueError(
                f"block_size={limits.block_size} is not a multiple of the {tile} tokens that a "
                f"TPU moves at once in a {cached.name} cache; "
                f"set --block-size to {round_up(limits.block_size, tile)}"
            )
        taken, chip = smem_bytes(limits), self.chip
        if taken > chip.smem_bytes:
            raise ValueError(
                f"block tables of {limits.num_rows} rows x {limits.max_blocks} blocks take "
                f"{taken} bytes of scalar memory, of which a {chip.name} has {chip.smem_bytes}; "
                "raise --block-size, or lower --max-model-len or --max-num-seqs"
            )
        try:
            self._check_vmem(limits, dtype)
        except ValueError as error:
            raise ValueError(f"{error}; {self._advice(limits, dtype)}") from error

    def attend(
        self,
        q: jax.Array,
        new: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Prepared,
        *,
        sinks: jax.Array | None = None,
        kv_scales: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Write this step's keys and values into the cache, then attend.

        Args:
          q: [T, K, G, D].
          new: keys and values as cached, but of q's dtype: [T, K, W].
          cache: [blocks, K, block_size, W].
          sinks: float32 [K, G, 1].
          kv_scales: float32 [K, 1, 2], of keys and of values.

        Returns:
          The output [T, K, G, V], and the updated cache.
        """
        # Importing Pallas takes long, and other platforms do not need it.
        from jaxllm_kernels.ragged_paged_attention.tpu_call import attend_segments, interpreter

        num_tokens = q.shape[0]
        call = functools.partial(
            attend_segments,
            name=self.name,
            config=self.config,
            max_blocks=batch.block_tables.shape[1],
            sinks=sinks,
            kv_scales=kv_scales,
            interpret=interpreter(self.chip) if self.interpret else False,
        )
        if batch.decode_only:
            sizes = self._sizes("decode", batch, num_tokens, q.dtype)
            multiple = sizes.step_tokens * sizes.row_groups
            out, cache = call(
                _pad_to(q, multiple, axis=0),
                _pad_to(new, multiple, axis=0),
                cache,
                prepared.decode[sizes.step_tokens],
                sizes=sizes,
            )
            return out[:num_tokens], cache
        # Most tokens are of prefills. Without the barrier XLA would compute all tokens' queries in
        # both orders, although few can be of short rows, and rotate them twice.
        q, new = lax.optimization_barrier((q.transpose(1, 2, 0, 3), new.swapaxes(0, 1)))
        sizes = self._sizes("prefill", batch, num_tokens, q.dtype)
        fewest, tile = self.fewest_of(num_tokens), sizes.step_tokens
        if fewest:
            tile = _written_tokens(tile, num_tokens)
        padded_q = _pad_to(q, sizes.step_tokens, axis=2)
        padded_new = _pad_to(new, tile, axis=1)
        write = functools.partial(
            self._write,
            padded_new,
            max_blocks=batch.block_tables.shape[1],
            interpret=call.keywords["interpret"],
        )
        ahead = prepared.ahead.get(sizes.step_tokens)
        if ahead is not None:
            cache = write(cache, ahead.seen, sizes=sizes)
        if fewest:
            of_tile = dataclasses.replace(sizes, step_tokens=tile, segment_tokens=tile)
            cache = write(cache, prepared.fresh[tile, fewest], sizes=of_tile)
        out, cache = call(
            padded_q,
            padded_new[:, : padded_q.shape[2]],
            cache,
            prepared.prefill[sizes.step_tokens, fewest],
            sizes=sizes,
            ahead=None if ahead is None else ahead.distances,
        )
        sizes = self._sizes("short", batch, num_tokens, q.dtype)
        short = prepared.short[sizes.step_tokens]
        move = functools.partial(_move_tokens, size=sizes.num_tokens, num_tokens=short.num_tokens)
        short_out, cache = call(
            move(q, 2, 0),
            move(new, 1, 0),
            cache,
            short.work,
            sizes=sizes,
            num_steps=short.num_steps,
        )
        # For an in-place update of the first output XLA would copy it first.
        padding = ((0, 0), (0, 0), (0, num_tokens - sizes.num_tokens), (0, 0))
        is_short = jnp.arange(num_tokens)[:, None] < short.num_tokens
        short_out = jnp.pad(move(short_out, 0, 2), padding)
        out = jnp.where(is_short, short_out, out[:, :, :num_tokens])
        return out.transpose(2, 0, 1, 3), cache

    def fewest_of(self, num_tokens: int) -> int:
        """The fewest tokens of fresh rows in a batch of so many; 0: it has no such rows."""
        return self.fewest_fresh if num_tokens >= self.fewest_fresh else 0

    def _write(
        self, new: jax.Array, cache: jax.Array, written: WrittenWork, **options: Any
    ) -> jax.Array:
        # Like `tpu_call`, it imports Pallas.
        from jaxllm_kernels.ragged_paged_attention.tpu_ahead import write_segments

        return write_segments(new, cache, written, name=self.name, **options)

    def step_tokens(self, kind: Kind, batch: RaggedBatch, num_tokens: int) -> int:
        """Tokens of a step of a kernel's grid."""
        return step_tokens(self.tunings[kind], _most_tokens(kind, batch, num_tokens), kind=kind)

    def _sizes(
        self, kind: Kind, batch: RaggedBatch, num_tokens: int, dtype: DTypeLike
    ) -> KernelSizes:
        return choose_sizes(
            self.config,
            self.layout,
            self.tunings[kind],
            kind=kind,
            num_tokens=_most_tokens(kind, batch, num_tokens),
            max_blocks=batch.block_tables.shape[1],
            block_size=batch.block_size,
            dtype=dtype,
            chip=self.chip,
        )

    def _check_vmem(self, limits: BatchLimits, dtype: DTypeLike) -> None:
        """Raise ValueError if no sizes of a kernel fit into a core's memory."""
        for kind in KINDS:
            choose_sizes(
                self.config,
                self.layout,
                self.tunings[kind],
                kind=kind,
                num_tokens=limits.num_tokens,
                max_blocks=limits.max_blocks,
                block_size=limits.block_size,
                dtype=dtype,
                chip=self.chip,
            )

    def _advice(self, limits: BatchLimits, dtype: DTypeLike) -> str:
        """Say what to change if `_check_vmem` refuses."""
        config, tile = self.config, sublane_tile(self.config.kv_dtype or dtype)
        while limits.block_size % (2 * tile) == 0:
            # The longest context stays the same.
            limits = dataclasses.replace(
                limits, block_size=limits.block_size // 2, max_blocks=limits.max_blocks * 2
            )
            try:
                self._check_vmem(limits, dtype)
            except ValueError:
                continue
            advice = f"set --block-size to {limits.block_size}"
            if smem_bytes(limits) > self.chip.smem_bytes:
                advice += ", and lower --max-model-len or --max-num-seqs"
            return advice
        return (
            "no block size helps: raise --tensor-parallel-size until a device has fewer than "
            f"{config.num_heads // config.num_kv_heads} query heads for a kv head, or "
            "set --attention-backend to xla and, since XLA copies the cache, "
            "--kv-cache-memory-bytes to a small part of the memory"
        )


def prepare_layers(
    layers: Collection[LayerKernels], batch: RaggedBatch, *, num_tokens: int
) -> Prepared:
    """Compute the work of a step's kernels."""
    batch = without_short_rows_that_see_ahead(batch, num_tokens)
    prepared = Prepared({}, {}, {}, {}, {})
    for kernels in layers:
        num_cores = kernels.chip.num_cores
        if batch.decode_only:
            step = kernels.step_tokens("decode", batch, num_tokens)
            prepared.decode[step] = decode_work(batch, step, num_cores)
        else:
            step, tile = (
                kernels.step_tokens(kind, batch, num_tokens) for kind in ("short", "prefill")
            )
            most = _most_tokens("short", batch, num_tokens)
            prepared.short[step] = short_work(batch, most, step, num_cores)
            fewest = kernels.fewest_of(num_tokens)
            is_fresh = fresh_rows(batch, fewest) if fewest else None
            work = prefill_work(batch, num_tokens, tile, None if is_fresh is None else ~is_fresh)
            prepared.prefill[tile, fewest] = work
            if is_fresh is not None:
                written = _written_tokens(tile, num_tokens)
                fresh = prefill_work(batch, num_tokens, written, is_fresh)
                prepared.fresh[written, fewest] = WrittenWork.of(fresh)
            if batch.last_seen is not None:
                prepared.ahead[tile] = ahead_work(batch, work, num_tokens, tile)
    return prepared


# Tokens of rows that do not attend are written so many at a time: a segment waits for its writes.
_WRITTEN_TOKENS = 256


def _written_tokens(step_tokens: int, num_tokens: int) -> int:
    return max(step_tokens, min(_WRITTEN_TOKENS, power_of_two(num_tokens)))


def _most_tokens(kind: Kind, batch: RaggedBatch, num_tokens: int) -> int:
    """The most tokens of a kernel in a step of so many."""
    most = SHORT_ROW * batch.context_lens.shape[0]
    return min(num_tokens, most) if kind == "short" else num_tokens


# Tokens that are moved together between the layouts of both kernels.
_MOVED_TOKENS = 128


def _move_tokens(
    x: jax.Array, source: int, destination: int, *, size: int, num_tokens: jax.Array
) -> jax.Array:
    """Move the axis of tokens, of which `size` are kept. Those from `num_tokens` on are arbitrary,
    and take no time."""
    block = min(size, _MOVED_TOKENS)

    def move(i: jax.Array, moved: jax.Array) -> jax.Array:
        start = jnp.minimum(i * block, size - block)
        piece = lax.dynamic_slice_in_dim(x, start, block, axis=source)
        piece = jnp.moveaxis(piece, source, destination)
        return lax.dynamic_update_slice_in_dim(moved, piece, start, axis=destination)

    shape = [n for axis, n in enumerate(x.shape) if axis != source]
    shape.insert(destination, size)
    num_blocks = lax.div(num_tokens + (block - 1), block)
    return lax.fori_loop(0, num_blocks, move, lax.empty(tuple(shape), x.dtype))


def _pad_to(x: jax.Array, multiple: int, *, axis: int) -> jax.Array:
    """Pad x with zeros at the end, to a multiple."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, padding)
