"""The host's memory for the blocks of one buffer, as far as devices of this process have them.

Over several hosts each process keeps its part of every block: the smallest box that has the shards
of its devices. In one process that is the whole block.
"""

from collections.abc import Sequence

import jax
import numpy as np


class HostBlocks:
    """Places for blocks, `[places, caches, ...]`. Memory is taken as places are written."""

    def __init__(self, num_places: int, buffer: jax.ShapeDtypeStruct):
        assert buffer.sharding is not None, "a buffer is for certain devices"
        self._shape, self._sharding = buffer.shape, buffer.sharding
        indices = self._sharding.addressable_devices_indices_map(buffer.shape).values()
        bounds = [
            [its.indices(size)[:2] for its, size in zip(index[1:], buffer.shape[1:], strict=True)]
            for index in indices
            if index is not None
        ]
        axes = list(zip(*bounds, strict=True))
        self._starts = [min(start for start, _ in axis) for axis in axes]
        sizes = [
            max(stop for _, stop in axis) - first
            for axis, first in zip(axes, self._starts, strict=True)
        ]
        self.array = np.empty((num_places, *sizes), buffer.dtype)

    def take(self, places: np.ndarray) -> jax.Array:
        """Copy the blocks at places to a buffer; its other parts are of other processes."""
        data = self.array[places]
        return jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: data[:, *self._here((index or ())[1:])]
        )

    def fill(self, places: Sequence[int], buffer: jax.Array) -> None:
        """Wait for a buffer, and copy its first blocks to places."""
        done: set[tuple[tuple[int, int], ...]] = set()
        for shard in buffer.addressable_shards:
            part = self._here(shard.index[1:])
            key = tuple((its.start, its.stop) for its in part)
            if key in done:  # a replica; the first one of all may be of another process
                continue
            done.add(key)
            data = np.asarray(shard.data)
            for index, place in enumerate(places):
                self.array[place][part] = data[index]

    def _here(self, index: Sequence[slice]) -> tuple[slice, ...]:
        """A part of a whole block, as a part of what is here."""
        found = []
        for its, size, first in zip(index, self._shape[1:], self._starts, strict=True):
            start, stop, _ = its.indices(size)
            found.append(slice(start - first, stop - first))
        return tuple(found)
