"""Ragged self-attention on Hopper GPUs, by a Pallas Mosaic GPU kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.compat import gpu_interpret_params
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
from jaxllm_kernels.ragged_self_attention.gpu_tiles import ALIGNMENT, choose_sizes, cut_tiles
from jaxllm_kernels.recurrent.gpu_parts import check_chip


@dataclass(frozen=True, kw_only=True)
class MosaicSelfAttention:
    """`api.SelfAttentionOp` on Hopper GPUs.

    Heads whose size is no multiple of 16 get columns of zeros, and a batch whose tokens are no
    multiple of 8 gets rows of them. XLA cannot partition the kernel: with several devices, call it
    within a shard_map.
    """

    name: str = "mosaic_sm90"
    # Thread blocks: the multiprocessors of an H100 or H200 (SXM).
    num_workers: int = 132
    # Emulate the kernel on a CPU, with a race detector.
    interpret: bool = False

    @classmethod
    def tuned_for(cls, chip: Chip) -> "MosaicSelfAttention":
        """The op for a chip; raises ValueError if the kernel does not run on it."""
        check_chip(chip)
        return cls(num_workers=chip.num_cores)

    def check(self, *, head_size: int, dtype: DTypeLike, value_size: int | None = None) -> None:
        """Raise ValueError if the kernel does not compute such heads; the size of values is that of
        keys if it is not given."""
        if jnp.dtype(dtype).itemsize != 2:
            raise ValueError(f"it computes in 16 bits, not in {jnp.dtype(dtype).name}")
        if value_size not in (None, head_size):
            raise ValueError(f"values of {value_size} do not have the size of keys, {head_size}")
        choose_sizes(head_size)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        query_starts: jax.Array,
        config: SelfAttentionConfig,
        query_ends: jax.Array | None = None,
    ) -> jax.Array:
        # Importing Mosaic takes long, and not every JAX has it.
        from jaxllm_kernels.ragged_self_attention.gpu_kernel import run

        num_tokens, _, head_size = q.shape
        sizes = choose_sizes(head_size)
        more = ((0, -num_tokens % ALIGNMENT), (0, 0), (0, sizes.head_size - head_size))
        q, k, v = (jnp.pad(x, more) for x in (q, k, v))
        out = run(
            q,
            k,
            v,
            cut_tiles(query_starts, query_ends, num_tokens, config, sizes.block_tokens),
            sizes=sizes,
            config=config,
            num_workers=self.num_workers,
            interpret=gpu_interpret_params() if self.interpret else False,
        )
        return out[:num_tokens, :, :head_size]
