"""Arrays that are kept in the host's memory while their devices have no place for them."""

import jax
import numpy as np


class HostArray:
    """A copy of an array on this process's devices. It holds each shard once, even if several
    devices have it."""

    def __init__(self, array: jax.Array):
        assert array.is_fully_addressable, "a part of it is on another host"
        self._shape, self._sharding = array.shape, array.sharding
        self._pieces: dict[tuple, np.ndarray] = {}
        for shard in array.addressable_shards:
            key = _key(shard.index)
            if key not in self._pieces:
                self._pieces[key] = np.array(shard.data)

    def to_device(self) -> jax.Array:
        """Return the array, with the sharding that it had."""
        return jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: self._pieces[_key(index)]
        )


def _key(index: tuple[slice, ...] | None) -> tuple:
    return tuple((cut.start, cut.stop) for cut in index or ())
