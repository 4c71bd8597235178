"""The sharding of arrays: weights have logical axes, and one table maps them to mesh axes.

A model names its axes (`axes=("heads", "hidden")`) and knows nothing of devices. XLA derives the
sharding of the rest of a step and inserts the collectives: an all-reduce after the attention and
one after the MLP of every layer.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.platform import Device

# The mesh axis of tensor parallelism.
TENSOR = "tensor"

_MESH_AXES: dict[str | None, str | None] = {
    "heads": TENSOR,
    "mlp": TENSOR,
    "experts": TENSOR,
    "vocab": TENSOR,
    "hidden": None,
    None: None,
}

Axes = tuple[str | None, ...]


class Part(NamedTuple):
    """The rows of a fused weight that come from one tensor of a checkpoint.

    A fused weight stores its shards one after the other, each with its share of every part. So a
    device computes its share of every part from its own shard.
    """

    rows: int  # of the tensor
    copies: int = 1  # neighbouring shards with the same share; above 1 for few kv heads


def make_mesh(devices: Sequence[Device]) -> Mesh:
    """The mesh of devices that run one model together."""
    return Mesh(np.array(devices), (TENSOR,))


def partition_spec(axes: Axes) -> PartitionSpec:
    """The PartitionSpec of an array with these axes."""
    return PartitionSpec(*(_MESH_AXES[name] for name in axes))


def num_pieces(mesh: Mesh, axes: Axes) -> int:
    """The number of shards of an array with these axes."""
    return math.prod(mesh.shape[name] for name in partition_spec(axes) if name is not None)


def device_bytes(array: jax.ShapeDtypeStruct) -> int:
    """The bytes of an array on each of its devices."""
    assert array.sharding is not None, array
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def place(shapes: Any, sharding: jax.sharding.Sharding) -> Any:
    """Give all shapes of a tree this sharding."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )


def sharding(mesh: Mesh, axes: Axes = ()) -> NamedSharding:
    """The sharding of an array with these axes; without axes it is replicated."""
    return NamedSharding(mesh, partition_spec(axes))
