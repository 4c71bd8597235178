"""Latent attention for Hopper GPUs, in Pallas Mosaic GPU kernels.

One kernel writes a step's rows (`gpu_place`), one attends (`gpu_attend`), and one merges results
of contexts that several thread blocks share (`gpu_merge`). What each thread block computes is
determined once per step (`gpu_tiles`).

The kernels' modules are imported only when they are traced, as in `ragged_paged_attention.gpu`.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.common import cdiv, round_up
from jaxllm_kernels.compat import gpu_interpret_params, why_no_mosaic_gpu
from jaxllm_kernels.mla.api import LatentConfig, check_latent
from jaxllm_kernels.mla.gpu_tiles import Teams, Tiles, cut_tiles
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import BatchLimits, RaggedBatch, locate_tokens
from jaxllm_kernels.ragged_paged_attention.pages import write_blocks

_BLOCK_SIZES = (16, 32, 64, 128)
# Of queries, two blocks of rows and the rest, 227 KiB of shared memory have room for this width.
_MOST_WIDTH = 576
_MOST_LATENT = 512
# Each of two warpgroups has half of the columns, in pieces of 64.
_LATENT_UNIT = 128
_WIDTH_UNIT = 64


class Prepared(NamedTuple):
    """The values that the layers of a step share."""

    positions: jax.Array  # int32 [T]
    write_blocks: jax.Array  # int32 [T]
    tiles: dict[tuple[Teams, int], Tiles]  # by teams and the fewest fresh tokens


@dataclass(frozen=True)
class MosaicGpuLatentBackend:
    """Latent attention by Mosaic GPU kernels for Hopper (sm_90)."""

    name: str = "mosaic_sm90"
    # Thread blocks of the persistent kernel: the multiprocessors of an H100 or H200 (SXM).
    num_workers: int = 132
    # Emulate the kernels on a CPU, with a race detector: for tests.
    interpret: bool = False

    @property
    def cache_head_axis(self) -> None:
        return None

    def tuned_for(self, chip: Chip) -> "MosaicGpuLatentBackend":
        """Use one thread block for each multiprocessor, if the chip's number is known."""
        if self.interpret or chip.num_cores == 1:
            return self
        return dataclasses.replace(self, num_workers=chip.num_cores)

    def check(
        self, config: LatentConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        check_latent(limits, dtype=dtype)

        def refuse(why: str, change: str = "set --attention-backend xla"):
            raise ValueError(f"attention backend {self.name} {why}; {change}")

        if not (self.interpret or chip.is_hopper):
            refuse(f"runs on Hopper GPUs (compute capability 9.0), not on {chip.name}")
        if why := why_no_mosaic_gpu():
            refuse(why)
        if jnp.dtype(dtype).itemsize != 2:
            refuse(
                f"computes in 16 bits, not in {jnp.dtype(dtype).name}",
                "set --dtype bfloat16 or float16, or --attention-backend xla",
            )
        if config.latent_size % _LATENT_UNIT or config.latent_size > _MOST_LATENT:
            refuse(
                f"supports latents of a multiple of {_LATENT_UNIT} numbers up to {_MOST_LATENT}, "
                f"not of {config.latent_size}"
            )
        if _row_width(config) > _MOST_WIDTH:
            refuse(
                f"supports up to {_MOST_WIDTH} numbers of a latent and its rotated key, "
                f"not {config.head_size}"
            )
        if config.scale <= 0:
            refuse(f"supports scales above zero, not {config.scale}")
        if limits.block_size not in _BLOCK_SIZES:
            refuse(
                f"supports blocks of {_BLOCK_SIZES} tokens, not {limits.block_size}",
                "set --block-size to one of them, or --attention-backend xla",
            )

    def cache_shape(
        self, config: LatentConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_blocks, block_size, _row_width(config)), dtype)

    def prepare(
        self, batch: RaggedBatch, configs: tuple[LatentConfig, ...], *, num_tokens: int
    ) -> Prepared:
        places = locate_tokens(batch, num_tokens)
        return Prepared(
            places.positions,
            write_blocks(batch, places),
            {
                (teams, fewest): cut_tiles(batch, teams, num_tokens=num_tokens, fewest_fresh=fewest)
                for teams, fewest in {(self._teams(c), c.fewest_fresh) for c in configs}
            },
        )

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
        from jaxllm_kernels.mla.gpu_attend import attend
        from jaxllm_kernels.mla.gpu_merge import merge
        from jaxllm_kernels.mla.gpu_place import place

        teams = self._teams(config)
        tiles = prepared.tiles[teams, config.fewest_fresh]
        interpret = gpu_interpret_params() if self.interpret else False
        num_tokens, num_heads, _ = q.shape
        beside = _row_width(config) - config.head_size
        # Queries of the last tile may reach past the last token.
        excess = cdiv(teams.lines, teams.heads) - 1
        lines = jnp.pad(q, ((0, excess), (0, teams.heads - num_heads), (0, beside)))
        out, cache = place(
            jnp.pad(rows, ((0, 0), (0, beside))),
            cache,
            prepared.write_blocks,
            prepared.positions,
            teams=teams,
            latent_size=config.latent_size,
            interpret=interpret,
        )
        out = jax.new_ref(out)
        partials = attend(
            lines.reshape(-1, lines.shape[-1]),
            cache,
            batch.block_tables,
            tiles,
            out,
            config=config,
            teams=teams,
            interpret=interpret,
        )
        merge(partials, tiles, out, teams=teams, interpret=interpret)
        of_heads = jax.freeze(out).reshape(num_tokens, teams.heads, config.latent_size)
        return of_heads[:, :num_heads], cache

    def _teams(self, config: LatentConfig) -> Teams:
        return Teams.of(config.num_heads, self.num_workers)


def _row_width(config: LatentConfig) -> int:
    return round_up(config.head_size, _WIDTH_UNIT)
