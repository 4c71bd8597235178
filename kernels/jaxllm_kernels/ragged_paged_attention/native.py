"""The implementation for CPUs in C++: one call of the library of native kernels per layer.

The cache is [blocks, K, 2 (keys, values), tokens of a page, H]; `native.cc` describes it. A block
of keys is transposed inside. A page has room for whole vectors of tokens. If values have another
size than keys, the last axis has room for both: [blocks, K, 1, tokens of a page, H + V]. A cache
of 8 bits has codes in the same places.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.common import round_up, storage_dtype, to_storage
from jaxllm_kernels.native.library import Library, NoLibrary
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    BatchLimits,
    KVScales,
    RaggedBatch,
    check_common,
)
from jaxllm_kernels.ragged_paged_attention.pages import to_cached

# Lanes of a vector.
LANES = 16


def usable_library(library: Library | NoLibrary, *, dtype: DTypeLike, chip: Chip) -> Library:
    """Return the library; raise ValueError, which says what to change, if it is not for this."""
    if chip.platform != "cpu":
        raise ValueError(f"it is for CPUs, and this is {chip.name}; set attention_backend='auto'")
    if isinstance(library, NoLibrary):
        raise ValueError(
            f"there is no library of native kernels: {library.reason}; set attention_backend='xla'"
        )
    if jnp.dtype(dtype).name not in library.dtypes:
        raise ValueError(
            f"dtype={jnp.dtype(dtype).name!r} is not one of {', '.join(library.dtypes)}; "
            "set attention_backend='xla'"
        )
    return library


@dataclass(frozen=True)
class NativeBackend:
    """Attention by threads; each takes tiles of queries."""

    # The registered backend has no library. The plan loads one and makes a backend with it.
    library: Library | NoLibrary = NoLibrary("nothing has loaded it")
    name: str = "native"
    sees_ahead: ClassVar[Literal[True]] = True

    @property
    def cache_head_axis(self) -> int:
        return 1

    def tuned_for(self, chip: Chip) -> "NativeBackend":
        del chip
        return self

    def check(
        self, config: AttentionConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        check_common(config, limits, dtype=dtype)
        library = usable_library(self.library, dtype=dtype, chip=chip)
        if config.kv_dtype not in (None, *library.kv_dtypes):
            raise ValueError(
                f"the library of native kernels was built without caches of {config.kv_dtype}; "
                "set attention_backend='xla'"
            )
        for size in (config.head_size, config.value_size):
            if size % LANES:
                raise ValueError(
                    f"head_size={size} is not a multiple of {LANES}; set attention_backend='xla'"
                )

    def cache_shape(
        self, config: AttentionConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        page_tokens = round_up(block_size, LANES)
        keys, values = config.head_size, config.value_size
        panels, width = (2, keys) if keys == values else (1, keys + values)
        return jax.ShapeDtypeStruct(
            (num_blocks, config.num_kv_heads, panels, page_tokens, width),
            jnp.dtype(dtype) if config.kv_dtype is None else storage_dtype(config.kv_dtype),
        )

    def prepare(
        self, batch: RaggedBatch, configs: tuple[AttentionConfig, ...], *, num_tokens: int
    ) -> None:
        del batch, configs, num_tokens

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: None,
        *,
        config: AttentionConfig,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        del prepared
        assert isinstance(self.library, Library), self
        scales = jnp.zeros(0, jnp.float32)
        if config.kv_dtype is not None:
            assert kv_scales is not None, config
            k, v = map(to_storage, to_cached(k, v, config, kv_scales))
            scales = jnp.concatenate(kv_scales).astype(jnp.float32)
        assert k.dtype == v.dtype == cache.dtype, (k.dtype, cache.dtype)
        call = jax.ffi.ffi_call(
            self.library.attention(q.dtype, config.kv_dtype),
            (
                jax.ShapeDtypeStruct((*q.shape[:2], config.value_size), q.dtype),
                jax.ShapeDtypeStruct(cache.shape, cache.dtype),
            ),
            input_output_aliases={3: 1},
        )
        out, cache = call(
            q,
            k,
            v,
            cache,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            jnp.zeros(0, jnp.int32) if batch.last_seen is None else batch.last_seen,
            jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
            scales,
            scale=np.float32(config.scale),
            sliding_window=np.int64(config.sliding_window or 0),
            chunk=np.int64(config.chunk or 0),
            soft_cap=np.float32(config.soft_cap or 0),
            block_size=np.int64(batch.block_size),
        )
        return out, cache
