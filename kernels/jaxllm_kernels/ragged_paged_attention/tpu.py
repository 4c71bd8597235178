"""The implementation for TPUs: two Pallas kernels, one for decodes and short rows and one for other
prefill chunks.

A layer's cache is one array [blocks, K, block_size, W]. A token's key and value are side by side in
a row of whole 128-lane registers. So the compiler pads no dimension, one copy loads a page with all
of its heads, and any number of heads works equally well. See `TokenLayout`.

A step that is not decode_only runs both kernels. Each writes the keys and values of its own rows,
and outputs of the second one are put into those of the first.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxllm_kernels.common import round_up
from jaxllm_kernels.platform import CHIPS, Chip
from jaxllm_kernels.ragged_paged_attention.api import (
    SHORT_ROW,
    AttentionConfig,
    BatchLimits,
    KVScales,
    RaggedBatch,
    check_common,
    check_is_usual,
)
from jaxllm_kernels.ragged_paged_attention.pages import to_cached
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import (
    KINDS,
    KernelSizes,
    Kind,
    TokenLayout,
    Tuning,
    choose_sizes,
    default_tuning,
    smem_bytes,
    step_tokens,
    sublane_tile,
    token_layout,
)
from jaxllm_kernels.ragged_paged_attention.tpu_work import (
    ShortWork,
    Work,
    decode_work,
    prefill_work,
    short_work,
)
from jaxllm_kernels.ragged_paged_attention.tuned import Key, log_if_missing, lookup


class Prepared(NamedTuple):
    """The values that the layers of a step share: the work of its kernels, by tokens per step."""

    decode: dict[int, Work]
    short: dict[int, ShortWork]
    prefill: dict[int, Work]


@dataclass(frozen=True)
class TpuBackend:
    """Attention by Pallas kernels.

    XLA cannot partition a bare Pallas call. Under tensor parallelism call `attend` within a
    shard_map over heads, with the config of a shard. Any number of kv heads per shard is possible.
    """

    name: str = "tpu"
    # The chip to compile for, or to emulate; None until `tuned_for` sets it.
    chip: str | None = None
    # None: measured sizes for the chip, or else a formula.
    decode_tuning: Tuning | None = None
    prefill_tuning: Tuning | None = None
    # Emulate the kernels on a CPU, with a race detector.
    interpret: bool = False

    @property
    def cache_head_axis(self) -> int:
        return 1

    def tuned_for(self, chip: Chip) -> "TpuBackend":
        return self if self.chip is not None else dataclasses.replace(self, chip=chip.name)

    def check(
        self, config: AttentionConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        check_common(config, limits, dtype=dtype)
        check_is_usual(config)
        if self.interpret:
            chip = self._chip()
        if chip.platform != "tpu":
            raise ValueError(
                f"attention backend {self.name!r} does not run on {chip.name}; "
                "set --attention-backend to xla"
            )
        if not chip.vmem_bytes:
            raise ValueError(
                f"attention backend {self.name!r} does not know the chip {chip.name!r}; "
                "set --attention-backend to xla"
            )
        if jnp.dtype(dtype) == jnp.float16:
            raise ValueError("TPUs do not compute in float16; set --dtype to bfloat16")
        tile = sublane_tile(config.kv_dtype or dtype)
        if limits.block_size % tile:
            raise ValueError(
                f"block_size={limits.block_size} is not a multiple of the {tile} tokens that a "
                f"TPU moves at once in a {jnp.dtype(config.kv_dtype or dtype).name} cache; "
                f"set --block-size to {round_up(limits.block_size, tile)}"
            )
        taken = smem_bytes(limits)
        if taken > chip.smem_bytes:
            raise ValueError(
                f"block tables of {limits.num_rows} rows x {limits.max_blocks} blocks take "
                f"{taken} bytes of scalar memory, of which a {chip.name} has {chip.smem_bytes}; "
                "raise --block-size, or lower --max-model-len or --max-num-seqs"
            )
        try:
            self._check_vmem(config, limits, dtype=dtype, chip=chip)
        except ValueError as error:
            advice = self._advice(config, limits, dtype=dtype, chip=chip)
            raise ValueError(f"{error}; {advice}") from error
        # Log only now: missing sizes do not matter for a refused config, or one tried for advice.
        for kind in KINDS:
            if self._asked(kind) is None:
                log_if_missing(chip.name, *_tuned_key(config, limits.block_size, kind))

    def cache_shape(
        self, config: AttentionConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        width = token_layout(config.head_size).width
        return jax.ShapeDtypeStruct(
            (num_blocks, config.num_kv_heads, block_size, width),
            jnp.dtype(config.kv_dtype or dtype),
        )

    def prepare(
        self, batch: RaggedBatch, configs: tuple[AttentionConfig, ...], *, num_tokens: int
    ) -> Prepared:
        chip, prepared = self._chip(), Prepared({}, {}, {})
        for config in set(configs):

            def size(kind: Kind, config: AttentionConfig = config) -> int:
                tuning = self._tuning(config, chip, batch.block_size, kind=kind)
                return step_tokens(tuning, _most_tokens(kind, batch, num_tokens), kind=kind)

            if batch.decode_only:
                step = size("decode")
                prepared.decode[step] = decode_work(batch, step, chip.num_cores)
            else:
                step, tile = size("short"), size("prefill")
                most = _most_tokens("short", batch, num_tokens)
                prepared.short[step] = short_work(batch, most, step, chip.num_cores)
                prepared.prefill[tile] = prefill_work(batch, num_tokens, tile)
        return prepared

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
        # Importing Pallas takes long, and other platforms do not need it.
        from jaxllm_kernels.ragged_paged_attention.tpu_call import attend_segments, interpreter

        num_tokens, _, head_size = q.shape
        num_kv_heads = config.num_kv_heads
        layout = token_layout(head_size)
        k, v = to_cached(k, v, config, kv_scales)
        # Values of the small dtypes are exact in q's dtype.
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        padding = ((0, 0), (0, 0), (0, layout.lanes - head_size))
        queries = jnp.pad(q, padding).reshape(num_tokens, num_kv_heads, -1, layout.lanes)
        shared = {
            "config": config,
            "max_blocks": batch.block_tables.shape[1],
            "sinks": None if sinks is None else _per_head(sinks, num_kv_heads),
            "kv_scales": None if kv_scales is None else jnp.stack(kv_scales, axis=-1)[:, None],
            "interpret": interpreter(self._chip()) if self.interpret else False,
        }

        if batch.decode_only:
            sizes = self._sizes(config, batch, q, kind="decode")
            out, cache = attend_segments(
                _pad_to(queries, sizes.step_tokens * sizes.row_groups, axis=0),
                _pad_to(_side_by_side(k, v, layout), sizes.step_tokens * sizes.row_groups, axis=0),
                cache,
                prepared.decode[sizes.step_tokens],
                sizes=sizes,
                **shared,
            )
            out = out[:num_tokens]  # [T, K, G, D]
        else:
            # Most tokens are of prefills. Without the barrier XLA would compute all tokens' queries
            # in both orders, although few can be of short rows, and rotate them twice.
            heads_first, new = lax.optimization_barrier(
                (
                    queries.transpose(1, 2, 0, 3),
                    _side_by_side(k.swapaxes(0, 1), v.swapaxes(0, 1), layout),
                )
            )
            sizes = self._sizes(config, batch, q, kind="prefill")
            out, cache = attend_segments(
                _pad_to(heads_first, sizes.step_tokens, axis=2),
                _pad_to(new, sizes.step_tokens, axis=1),
                cache,
                prepared.prefill[sizes.step_tokens],
                sizes=sizes,
                **shared,
            )
            sizes = self._sizes(config, batch, q, kind="short")
            short = prepared.short[sizes.step_tokens]
            move = functools.partial(
                _move_tokens, size=sizes.num_tokens, num_tokens=short.num_tokens
            )
            short_out, cache = attend_segments(
                move(heads_first, 2, 0),
                move(new, 1, 0),
                cache,
                short.work,
                sizes=sizes,
                num_steps=short.num_steps,
                **shared,
            )
            # For an in-place update of the first output XLA would copy it first.
            padding = ((0, 0), (0, 0), (0, num_tokens - sizes.num_tokens), (0, 0))
            is_short = jnp.arange(num_tokens)[:, None] < short.num_tokens
            short_out = jnp.pad(move(short_out, 0, 2), padding)
            out = jnp.where(is_short, short_out, out[:, :, :num_tokens]).transpose(2, 0, 1, 3)

        out = out[..., layout.out_start : layout.out_start + head_size]
        return out.reshape(q.shape), cache

    def _chip(self) -> Chip:
        assert self.chip is not None, "tuned_for(chip) says what to compile for"
        return CHIPS[self.chip]

    def _check_vmem(
        self, config: AttentionConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        """Raise ValueError if no sizes of a kernel fit into a core's memory."""
        for kind in KINDS:
            choose_sizes(
                config,
                self._tuning(config, chip, limits.block_size, kind=kind),
                kind=kind,
                num_tokens=limits.num_tokens,
                max_blocks=limits.max_blocks,
                block_size=limits.block_size,
                dtype=dtype,
                chip=chip,
            )

    def _advice(
        self, config: AttentionConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> str:
        """Say what to change if `_check_vmem` refuses."""
        tile = sublane_tile(config.kv_dtype or dtype)
        while limits.block_size % (2 * tile) == 0:
            # The longest context stays the same.
            limits = dataclasses.replace(
                limits, block_size=limits.block_size // 2, max_blocks=limits.max_blocks * 2
            )
            try:
                self._check_vmem(config, limits, dtype=dtype, chip=chip)
            except ValueError:
                continue
            advice = f"set --block-size to {limits.block_size}"
            if smem_bytes(limits) > chip.smem_bytes:
                advice += ", and lower --max-model-len or --max-num-seqs"
            return advice
        return (
            "no block size helps: raise --tensor-parallel-size until a device has fewer than "
            f"{config.num_heads // config.num_kv_heads} query heads for a kv head, or "
            "set --attention-backend to xla and, since XLA copies the cache, "
            "--kv-cache-memory-bytes to a small part of the memory"
        )

    def _asked(self, kind: Kind) -> Tuning | None:
        return self.prefill_tuning if kind == "prefill" else self.decode_tuning

    def _tuning(
        self, config: AttentionConfig, chip: Chip, block_size: int, *, kind: Kind
    ) -> Tuning:
        asked = self._asked(kind)
        if asked is not None:
            return asked
        measured = lookup(chip.name, *_tuned_key(config, block_size, kind))
        if measured is not None:
            return Tuning(**measured)
        return default_tuning(config, chip, kind=kind)

    def _sizes(
        self, config: AttentionConfig, batch: RaggedBatch, q: jax.Array, *, kind: Kind
    ) -> KernelSizes:
        chip = self._chip()
        return choose_sizes(
            config,
            self._tuning(config, chip, batch.block_size, kind=kind),
            kind=kind,
            num_tokens=_most_tokens(kind, batch, q.shape[0]),
            max_blocks=batch.block_tables.shape[1],
            block_size=batch.block_size,
            dtype=q.dtype,
            chip=chip,
        )


def _tuned_key(config: AttentionConfig, block_size: int, kind: Kind) -> tuple[str, Key]:
    """The kernel's name, and the facts that its measured sizes depend on."""
    return f"tpu_{'prefill' if kind == 'prefill' else 'decode'}", {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "block_size": block_size,
        "kv_dtype": config.kv_dtype,
    }


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


def _side_by_side(k: jax.Array, v: jax.Array, layout: TokenLayout) -> jax.Array:
    """Join keys and values, both [..., H], to rows of the cache: [..., W]."""
    head_size = k.shape[-1]
    between = layout.value_start - head_size
    after = layout.width - layout.value_start - head_size
    k = jnp.pad(k, ((0, 0), (0, 0), (0, between)))
    v = jnp.pad(v, ((0, 0), (0, 0), (0, after)))
    return jnp.concatenate([k, v], axis=-1)


def _per_head(sinks: jax.Array, num_kv_heads: int) -> jax.Array:
    return sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1)


def _pad_to(x: jax.Array, multiple: int, *, axis: int) -> jax.Array:
    """Pad x with zeros at the end, to a multiple."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, padding)
