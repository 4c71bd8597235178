"""The implementation for TPUs: the kernels of `ragged_paged_attention`, for one kv head.

A row of the cache is the key of that head, and its latent is the value, so a page is loaded once
for both. All query heads are lines of one matrix. A layer's cache is [blocks, block_size, W], whose
last axis is whole registers.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.mla.api import LatentConfig, check_latent
from jaxllm_kernels.platform import CHIPS, Chip
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig, BatchLimits, RaggedBatch
from jaxllm_kernels.ragged_paged_attention.tpu_layer import (
    LayerKernels,
    Prepared,
    check_chip,
    prepare_layers,
)
from jaxllm_kernels.ragged_paged_attention.tpu_layout import TokenLayout, latent_layout
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import (
    KINDS,
    MIN_TILE_TOKENS,
    Kind,
    Tuning,
    power_of_two,
)


@dataclass(frozen=True)
class TpuLatentBackend:
    """Latent attention by Pallas kernels.

    Under tensor parallelism call `attend` within a shard_map over query heads, as `TpuBackend`.
    """

    name: str = "tpu"
    # As in `TpuBackend`.
    chip: str | None = None
    decode_tuning: Tuning | None = None
    prefill_tuning: Tuning | None = None
    interpret: bool = False

    @property
    def cache_head_axis(self) -> None:
        return None

    def tuned_for(self, chip: Chip) -> "TpuLatentBackend":
        return self if self.chip is not None else dataclasses.replace(self, chip=chip.name)

    def check(
        self, config: LatentConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        check_latent(limits, dtype=dtype)
        if self.interpret:
            chip = self._chip()
        check_chip(self.name, chip, dtype)
        self._kernels(config, chip).check(limits, dtype=dtype)

    def cache_shape(
        self, config: LatentConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        width = latent_layout(config.latent_size, config.rope_size).width
        return jax.ShapeDtypeStruct((num_blocks, block_size, width), jnp.dtype(dtype))

    def prepare(
        self, batch: RaggedBatch, configs: tuple[LatentConfig, ...], *, num_tokens: int
    ) -> Prepared:
        layers = [self._kernels(config, self._chip()) for config in set(configs)]
        return prepare_layers(layers, batch, num_tokens=num_tokens)

    def attend(
        self,
        q: jax.Array,
        rows: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Prepared,
        *,
        config: LatentConfig,
    ) -> tuple[jax.Array, jax.Array]:
        kernels = self._kernels(config, self._chip())
        # Zeros, where a row of the cache has more lanes.
        beside = kernels.layout.width - config.head_size
        queries = jnp.pad(q, ((0, 0), (0, 0), (0, beside)))
        new = jnp.pad(rows.astype(q.dtype), ((0, 0), (0, beside)))
        out, paged = kernels.attend(queries[:, None], new[:, None], cache[:, None], batch, prepared)
        return out[:, 0, :, : config.latent_size], paged[:, 0]

    def _chip(self) -> Chip:
        assert self.chip is not None, "tuned_for(chip) says what to compile for"
        return CHIPS[self.chip]

    def _kernels(self, config: LatentConfig, chip: Chip) -> LayerKernels:
        def tuning(kind: Kind) -> Tuning:
            asked = self.prefill_tuning if kind == "prefill" else self.decode_tuning
            return asked or latent_tuning(config.num_heads, layout, chip, kind=kind)

        layout = latent_layout(config.latent_size, config.rope_size)
        return LayerKernels(
            name="latent_attention",
            config=AttentionConfig(
                num_heads=config.num_heads,
                num_kv_heads=1,
                head_size=config.head_size,
                v_head_size=config.latent_size,
                scale=config.scale,
            ),
            layout=layout,
            chip=chip,
            tunings={kind: tuning(kind) for kind in KINDS},
            fewest_fresh=config.fewest_fresh,
            interpret=self.interpret,
        )


# Query lines of a tile of a prefill, if its fewest tokens do not have more.
_PREFILL_LINES = 512


def latent_tuning(num_heads: int, layout: TokenLayout, chip: Chip, *, kind: Kind) -> Tuning:
    """A formula for cases without measurements."""
    if kind == "prefill":
        tile = max(min(power_of_two(_PREFILL_LINES // num_heads), 256), MIN_TILE_TOKENS)
        return Tuning(
            step_tokens=tile,
            slot_tokens=512,
            chunk_tokens=256,
            num_slots=2,
            batch_heads=1,
        )
    # Fetching a slot takes as long as starting a fetch, and three slots are in flight.
    slot_tokens = int(chip.hbm_bytes_per_second * 0.5e-6 / (layout.width * 2))
    return Tuning(
        step_tokens=16 if num_heads <= 32 else 8,
        slot_tokens=min(max(slot_tokens, 1024), 2048),
        chunk_tokens=1024,
        piece_tokens=512,
        num_slots=4,
        batch_heads=1,
    )
