"""Latent attention (MLA) over a paged cache: the contract of every implementation.

A layer keeps one row per token, which all heads share: a latent, and a key that is rotated by the
token's position. The caller has absorbed the matrices that make keys and values of a latent: into
the queries, and into what follows the outputs. So each head attends to the rows themselves. A
token's score is the product of a query and the whole row; its value is the latent.

One call computes one layer for one step, as in `ragged_paged_attention`, whose `RaggedBatch` it
takes: it writes the step's rows into the paged cache, and then attends causally. Rows that are
whole prompts of at least `fewest_fresh` tokens are only written: the caller attends to them with
keys and values.

Axis letters: T tokens, N query heads, L latent size, W = L + the size of the rotated key.
"""

from dataclasses import dataclass
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import BatchLimits, RaggedBatch


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """The static part of a layer's attention on one device; equal for layers of the same kind."""

    num_heads: int
    latent_size: int
    rope_size: int  # of the rotated key
    # Scores are scale * (q . row).
    scale: float
    # Rows that have no context before this step and bring at least so many tokens, two or more, are
    # *fresh*: the op writes them and need not attend. The caller has all that they see. 0: no
    # row is.
    fewest_fresh: int = 0

    # As in `AttentionConfig`: the size of queries and rows, that of outputs, and that a token sees
    # all tokens before it.

    @property
    def head_size(self) -> int:
        return self.latent_size + self.rope_size

    @property
    def value_size(self) -> int:
        return self.latent_size

    @property
    def sliding_window(self) -> None:
        return None

    @property
    def chunk(self) -> None:
        return None


class LatentBackend(Protocol):
    """An implementation of the op: a frozen dataclass, since it is a static argument."""

    @property
    def name(self) -> str:
        """The name under which the backend is registered, also used in logs."""
        ...

    @property
    def cache_head_axis(self) -> None:
        """The cache has no heads: each device that has some of the query heads has all of it."""
        ...

    def tuned_for(self, chip: Chip) -> Self:
        """Return the backend with its tunables chosen for a chip."""
        ...

    def check(
        self, config: LatentConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        """Raise ValueError, which says what to change, if the backend cannot run this."""
        ...

    def cache_shape(
        self, config: LatentConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one layer's cache for rows of type dtype. New caches are zero."""
        ...

    def prepare(
        self, batch: RaggedBatch, configs: tuple[LatentConfig, ...], *, num_tokens: int
    ) -> Any:
        """Compute once per step what layers with these configs (repetitions allowed) share."""
        ...

    def attend(
        self,
        q: jax.Array,
        rows: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Any,
        *,
        config: LatentConfig,
    ) -> tuple[jax.Array, jax.Array]:
        """Write this step's rows into the cache, then attend.

        Args:
          q: [T, N, W]: a query against latents, then one against rotated keys.
          rows: [T, W]: a token's latent, then its rotated key, of the dtype that was given to
            `cache_shape`.
          cache: an array of `cache_shape`. Donate it: it is updated in place.

        Returns:
          The weighted sums of latents [T, N, L], of q's dtype, and the updated cache. Scores and
          sums are float32. A token's result does not depend on other rows of the batch. Those of
          fresh rows are arbitrary, and may be no numbers.
        """
        ...


_backends: dict[str, LatentBackend] = {}


def register_latent_backend(backend: LatentBackend) -> None:
    """Register a backend under its name."""
    assert backend.name not in _backends, backend
    _backends[backend.name] = backend


def get_latent_backend(name: str) -> LatentBackend:
    """Return the backend that is registered under a name."""
    if name not in _backends:
        raise ValueError(
            "the model has latent attention, for which there "
            f"is {' and '.join(map(repr, sorted(_backends)))}; set --attention-backend to one of "
            "them, or to auto"
        )
    return _backends[name]


# The default backends of platforms, best first.
_DEFAULTS = {"cpu": ("native", "xla"), "gpu": ("mosaic_sm90", "xla"), "tpu": ("tpu", "xla")}


def default_latent_backends(chip: Chip) -> tuple[str, ...]:
    """Names of the default backends of a chip, best first."""
    return _DEFAULTS.get(chip.platform, ("xla",))


def check_latent(limits: BatchLimits, *, dtype: DTypeLike) -> None:
    """Refuse what no backend can run."""
    if limits.block_size < 1:
        raise ValueError(f"block_size={limits.block_size} must be at least 1; set --block-size")
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"attention in {jnp.dtype(dtype).name} is not supported; "
            "set --dtype to float32, bfloat16 or float16"
        )
