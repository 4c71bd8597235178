"""Where arrays lie: logical names on the axes of weights, and one table from names to mesh axes.

A model says what an axis is (`axes=("heads", "hidden")`), never on which devices it lies. XLA
derives the rest of a step, and puts the collectives where the cuts ask for them: one sum after the
attention and one after the MLP of every layer.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.platform import Device

# The mesh axis over which a model's matrices are cut.
TENSOR = "tensor"

_MESH_AXES: dict[str | None, str | None] = {
    "heads": TENSOR,
    "mlp": TENSOR,
    "vocab": TENSOR,
    "hidden": None,
    None: None,
}

Axes = tuple[str | None, ...]


class Part(NamedTuple):
    """The rows of a fused weight that come from one tensor of a checkpoint.

    The shards of a fused weight lie one after the other, each with its share of every part, so that
    a shard's product is all that its device needs of each of them.
    """

    rows: int  # of the tensor
    copies: int = 1  # neighbouring shards with the same share; above 1 where rows are too few


def make_mesh(devices: Sequence[Device]) -> Mesh:
    """A mesh of devices that run one model together."""
    return Mesh(np.array(devices), (TENSOR,))


def partition_spec(axes: Axes) -> PartitionSpec:
    """How an array with these axes is cut."""
    return PartitionSpec(*(_MESH_AXES[name] for name in axes))


def num_pieces(mesh: Mesh, axes: Axes) -> int:
    """Into how many pieces an array with these axes is cut."""
    return math.prod(mesh.shape[name] for name in partition_spec(axes) if name is not None)


def place(shapes: Any, sharding: jax.sharding.Sharding) -> Any:
    """A tree of shapes, all of them with this sharding."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )


def sharding(mesh: Mesh, axes: Axes = ()) -> NamedSharding:
    """Where an array with these axes lies; without axes, the whole of it on every device."""
    return NamedSharding(mesh, partition_spec(axes))
