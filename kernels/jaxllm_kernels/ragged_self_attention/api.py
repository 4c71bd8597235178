"""Ragged self-attention: every token attends to all tokens of its row, before and behind it.

One call computes one layer for one step of an encoder. The rows lie one after another in a flat
batch, whole and without padding between them, and nothing is cached.

Axis letters: T tokens, R rows, N query heads, K kv heads, H head size.
"""

from dataclasses import dataclass
from typing import Protocol

import jax


@dataclass(frozen=True, kw_only=True)
class SelfAttentionConfig:
    """The static part of a layer's attention."""

    scale: float  # scores are scale * (q . k)
    # A token sees those at most so far from it, on both sides; None: all of its row.
    reach: int | None = None


class SelfAttentionOp(Protocol):
    """Implementations are static arguments of jitted functions, so they must be hashable. They are
    traced by the caller."""

    @property
    def name(self) -> str: ...

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        query_starts: jax.Array,
        config: SelfAttentionConfig,
    ) -> jax.Array:
        """Return [T, N, H] of q [T, N, H] and k and v [T, K, H].

        The tokens of row r are the flat positions [query_starts[r], query_starts[r + 1]), int32
        [R + 1]. Rows of padding are empty. Tokens at or past query_starts[R] belong to no row;
        their outputs are arbitrary but finite. Scores and sums are float32.
        """
        ...
