"""Arrays that wait in the host's memory for a place on their devices."""

import jax
import numpy as np


class HostArray:
    """A copy of an array of this process's devices, in the pieces that they have of it: each piece
    once, on however many devices it lies."""

    def __init__(self, array: jax.Array):
        assert array.is_fully_addressable, "a part of it is on another host"
        self._shape, self._sharding = array.shape, array.sharding
        self._pieces: dict[tuple, np.ndarray] = {}
        for shard in array.addressable_shards:
            key = _key(shard.index)
            if key not in self._pieces:
                self._pieces[key] = np.array(shard.data)

    def to_device(self) -> jax.Array:
        """The array, where it was."""
        return jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: self._pieces[_key(index)]
        )


def _key(index: tuple[slice, ...] | None) -> tuple:
    return tuple((cut.start, cut.stop) for cut in index or ())
