"""The layout of a token in the paged cache of the TPU kernels."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.common import round_up

# Lanes of a vector register. The minor dimension of every array is padded to a multiple.
LANES = 128
# Rows of a vector register of 32-bit numbers.
SUBLANES = 8


def sublane_tile(dtype: DTypeLike) -> int:
    """Rows of the smallest piece of an array that can be copied or stored separately."""
    return 32 // jnp.dtype(dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """The places of a token's key and value in its row of the cache, for one kv head.

    They are side by side. If both fit into one register's lanes, they share it: queries have zeros
    in the lanes of the value, and outputs are cut from those lanes. Otherwise each is padded to
    whole registers. The value of a latent is a part of its key, so it has no place of its own.
    """

    # Of a query; a row's first lanes are multiplied with it.
    lanes: int
    # Of the row.
    width: int
    # First lane of the value in the row.
    value_start: int
    # The lanes that are summed: so many, from that one on.
    first_value_lane: int
    value_lanes: int

    @property
    def out_start(self) -> int:
        """First lane of the output in the `value_lanes`."""
        return self.value_start - self.first_value_lane

    @property
    def values(self) -> slice:
        """The lanes of a row that are summed."""
        return slice(self.first_value_lane, self.first_value_lane + self.value_lanes)


def token_layout(head_size: int) -> TokenLayout:
    """The layout of a key and a value of the same size."""
    if 2 * head_size <= LANES:
        return TokenLayout(
            lanes=LANES,
            width=LANES,
            value_start=head_size,
            first_value_lane=0,
            value_lanes=LANES,
        )
    lanes = round_up(head_size, LANES)
    return TokenLayout(
        lanes=lanes,
        width=2 * lanes,
        value_start=lanes,
        first_value_lane=lanes,
        value_lanes=lanes,
    )


def latent_layout(latent_size: int, rope_size: int) -> TokenLayout:
    """The layout of a key whose first part is the value."""
    lanes = round_up(latent_size + rope_size, LANES)
    return TokenLayout(
        lanes=lanes,
        width=lanes,
        value_start=0,
        first_value_lane=0,
        value_lanes=round_up(latent_size, LANES),
    )
