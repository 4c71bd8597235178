"""The contract of low-rank products: what adapters add to the outputs of a linear layer.

An adapter changes the weight W [out, in] of a layer by B A, with A [r, in] and B [out, r]. Adapters
are in numbered slots, and tokens of one batch may have different ones, or none.
"""

from typing import NamedTuple, Protocol

import jax


class LowRank(NamedTuple):
    """The matrices of one layer in all n slots. Smaller ranks, and layers that an adapter lacks,
    are filled up with zeros.

    A layer that is fused of P parts has an A for each part. Its outputs are S shards one after the
    other, each with its C columns of every part.
    """

    a: jax.Array  # [n, P, r, in]
    b: tuple[jax.Array, ...]  # of each part: [n, r, S, C]

    @property
    def num_slots(self) -> int:
        return self.a.shape[0]


class LowRankOp(Protocol):
    """Adds up B A x for tokens x [T, in]: float32 [T, out].

    `slots`, i32 [T], has the slot of each token's adapter. Tokens without one have the number of
    slots, and get zeros. A token's result depends on no other token and no other slot: all
    matrices are finite. Implementations are frozen dataclasses, as those of `dense.api.Matmul`.
    """

    def __call__(self, x: jax.Array, weights: LowRank, slots: jax.Array) -> jax.Array: ...
