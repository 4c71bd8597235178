"""Ragged self-attention on TPUs, by a Pallas kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.tpu_layout import LANES, SUBLANES
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
from jaxllm_kernels.ragged_self_attention.tpu_sizes import Heads, choose_sizes, padded_tokens
from jaxllm_kernels.ragged_self_attention.xla import locate_places, seen_places
from jaxllm_kernels.recurrent.tpu_blocks import chip_named, interpreter

_LARGEST_HEAD = 256


@dataclass(frozen=True, kw_only=True)
class TpuSelfAttention:
    """`api.SelfAttentionOp` on TPUs. Outputs of padding are zeros.

    XLA cannot partition a Pallas call: with several devices, call it within a shard_map.
    """

    # The chip to compile for, or to emulate.
    chip: str
    name: str = "tpu"
    # Emulate the kernel on a CPU, with a race detector.
    interpret: bool = False

    def check(
        self,
        *,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: DTypeLike,
        value_size: int | None = None,
    ) -> None:
        """Raise ValueError if the kernel does not compute such heads, as on one device, for batches
        of up to so many tokens. The size of values is that of keys if it is not given."""
        chip = self._chip
        if not chip.vmem_bytes:
            raise ValueError(f"the chip {chip.name!r} is not known")
        name = jnp.dtype(dtype).name
        if name not in ("bfloat16", "float32"):
            raise ValueError(f"dtype={name!r} is not bfloat16 or float32")
        heads = Heads(num_heads, num_kv_heads, head_size, value_size)
        for size in (heads.head_size, heads.value_size):
            if size > _LARGEST_HEAD or size % SUBLANES:
                raise ValueError(
                    f"heads of {size} are no multiple of {SUBLANES} up to {_LARGEST_HEAD}"
                )
        choose_sizes(num_tokens, heads, dtype, chip)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        query_starts: jax.Array,
        config: SelfAttentionConfig,
        query_ends: jax.Array | None = None,
    ) -> jax.Array:
        # Importing Pallas takes long, and other platforms do not need it.
        from jaxllm_kernels.ragged_self_attention.tpu_kernel import Tiles, run

        num_tokens, num_heads, head_size = q.shape
        heads = Heads(num_heads, k.shape[1], head_size, v.shape[2])
        sizes = choose_sizes(num_tokens, heads, q.dtype, self._chip)
        padded = padded_tokens(num_tokens)
        num_real = query_starts[-1]
        is_real, _ = locate_places(query_starts, query_ends, padded)
        first, end = seen_places(query_starts, query_ends, padded, config)
        first, end = (
            jnp.where(is_real, bound, nothing).reshape(-1, sizes.tile)
            for bound, nothing in ((first, padded), (end, 0))
        )
        low = first.min(axis=1)
        tiles = Tiles(
            first=low - low % LANES,
            end=end.max(axis=1),
            whole_first=first.max(axis=1),
            whole_end=end.min(axis=1),
            num_real=num_real[None],
        )
        more = ((0, 0), (0, 0), (0, padded - num_tokens))
        q, k, v = (jnp.pad(x.transpose(1, 2, 0), more) for x in (q, k, v))
        out = run(
            q,
            k,
            v,
            tiles,
            jnp.stack([first, end], axis=1),
            sizes=sizes,
            config=config,
            num_rows=len(query_starts) - 1,
            interpret=interpreter(self._chip, self.interpret),
        )
        return out[:, :, :num_tokens].transpose(2, 0, 1)

    @property
    def _chip(self) -> Chip:
        return chip_named(self.chip)
