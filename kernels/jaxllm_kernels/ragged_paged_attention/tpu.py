"""The implementation for TPUs: two Pallas kernels, see `tpu_layer.py`.

A layer's cache is one array [blocks, K, block_size, W]. A token's key and value are side by side in
a row of whole 128-lane registers. So the compiler pads no dimension, one copy loads a page with all
of its heads, and any number of heads works equally well. See `TokenLayout`.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.platform import CHIPS, Chip
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    BatchLimits,
    KVScales,
    RaggedBatch,
    check_common,
    check_is_usual,
)
from jaxllm_kernels.ragged_paged_attention.pages import to_cached
from jaxllm_kernels.ragged_paged_attention.tpu_layer import (
    LayerKernels,
    Prepared,
    check_chip,
    prepare_layers,
)
from jaxllm_kernels.ragged_paged_attention.tpu_layout import TokenLayout, token_layout
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import KINDS, Kind, Tuning, default_tuning
from jaxllm_kernels.ragged_paged_attention.tuned import Key, log_if_missing, lookup


@dataclass(frozen=True)
class TpuBackend:
    """Attention by Pallas kernels.

    XLA cannot partition a bare Pallas call. Under tensor parallelism call `attend` within a
    shard_map over heads, with the config of a shard. Any number of kv heads per shard is possible.
    """

    sees_ahead: ClassVar[Literal[True]] = True
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
        check_chip(self.name, chip, dtype)
        self._kernels(config, limits.block_size, chip).check(limits, dtype=dtype)
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
        layers = [self._kernels(config, batch.block_size, self._chip()) for config in set(configs)]
        return prepare_layers(layers, batch, num_tokens=num_tokens)

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
        num_tokens, _, head_size = q.shape
        num_kv_heads = config.num_kv_heads
        layout = token_layout(head_size)
        k, v = to_cached(k, v, config, kv_scales)
        # Values of the small dtypes are exact in q's dtype.
        new = _side_by_side(k.astype(q.dtype), v.astype(q.dtype), layout)
        queries = jnp.pad(q, ((0, 0), (0, 0), (0, layout.lanes - head_size)))
        out, cache = self._kernels(config, batch.block_size, self._chip()).attend(
            queries.reshape(num_tokens, num_kv_heads, -1, layout.lanes),
            new,
            cache,
            batch,
            prepared,
            sinks=None if sinks is None else _per_head(sinks, num_kv_heads),
            kv_scales=None if kv_scales is None else jnp.stack(kv_scales, axis=-1)[:, None],
        )
        out = out[..., layout.out_start : layout.out_start + head_size]
        return out.reshape(q.shape), cache

    def _chip(self) -> Chip:
        assert self.chip is not None, "tuned_for(chip) says what to compile for"
        return CHIPS[self.chip]

    def _kernels(self, config: AttentionConfig, block_size: int, chip: Chip) -> LayerKernels:
        return LayerKernels(
            name="ragged_paged_attention",
            config=config,
            layout=token_layout(config.head_size),
            chip=chip,
            tunings={kind: self._tuning(config, chip, block_size, kind=kind) for kind in KINDS},
            interpret=self.interpret,
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


def _tuned_key(config: AttentionConfig, block_size: int, kind: Kind) -> tuple[str, Key]:
    """The kernel's name, and the facts that its measured sizes depend on."""
    return f"tpu_{'prefill' if kind == 'prefill' else 'decode'}", {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "block_size": block_size,
        "kv_dtype": config.kv_dtype,
    }


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
