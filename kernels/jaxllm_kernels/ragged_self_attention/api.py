"""Ragged self-attention: every token attends to the tokens of its row, all or those before it.

One call computes one layer for one step. The rows lie one after another in a flat batch, whole, and
nothing is cached. An encoder has all of its texts in a step. A step of a decoder may have whole
prompts among rows that go on from a cache; then the former alone are rows of this op.

Axis letters: T tokens, R rows, N query heads, K kv heads, H head size, V size of values (mostly H).
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
    # Whether a token sees itself and those before it alone, and none behind it.
    causal: bool = False


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
        query_ends: jax.Array | None = None,
    ) -> jax.Array:
        """Return [T, N, V] of q [T, N, H], k [T, K, H] and v [T, K, V].

        The tokens of row r are the flat positions [query_starts[r], query_ends[r]), int32 [R + 1]
        and [R]. A row ends at the start of the next one or before it; without `query_ends` at it.
        Rows of padding are empty. Tokens outside of all rows are padding; their outputs are
        arbitrary but finite. Scores and sums are float32.
        """
        ...
