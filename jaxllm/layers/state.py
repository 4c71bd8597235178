"""What a mixer keeps of a request in place of keys and values: a state, which does not grow.

A mixer declares the arrays of its state by a `StateConfig`. The runner keeps them for every slot,
and gives all of them to the mixer, which hands them to its ops and returns them updated. So they
travel as a cache of pages does. Which slots a step's rows have, and which rows begin with zeros, is
in `StepContext.state_rows`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxllm_kernels.causal_conv.api import ConvOp, state_dtype
from jaxllm_kernels.gated_delta.api import DeltaOp
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionOp
from jaxllm_kernels.ssd.api import SsdOp

from jaxllm.parallel.sharding import Axes, num_pieces, partition_spec, sharding

# The arrays of a mixer's state, each [S, ...].
States = tuple[jax.Array, ...]


class StateArray(NamedTuple):
    """An array of a mixer's state, of one slot and over all shards."""

    shape: tuple[int, ...]
    dtype: Any
    axes: Axes

    def of_slots(self, num_slots: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """The array for all slots, on the devices of a mesh."""
        return jax.ShapeDtypeStruct(
            (num_slots, *self.shape), self.dtype, sharding=sharding(mesh, (None, *self.axes))
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of a slot."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """The state of a mixer."""

    arrays: tuple[StateArray, ...]

    def of_slots(self, num_slots: int, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Its arrays for all slots, on the devices of a mesh."""
        return tuple(array.of_slots(num_slots, mesh) for array in self.arrays)


def last_inputs(width: int, num_channels: int, dtype: DTypeLike) -> StateArray:
    """What a short convolution over `width` tokens keeps: its inputs, cut by channels."""
    return StateArray((width - 1, num_channels), state_dtype(dtype), (None, "heads"))


def head_matrices(num_heads: int, rows: int, columns: int) -> StateArray:
    """A matrix for each head."""
    return StateArray((num_heads, rows, columns), jnp.float32, ("heads",))


@dataclass(frozen=True, kw_only=True)
class StateOps:
    """The implementations of the ops with states. The plan chooses them."""

    conv: ConvOp
    delta: DeltaOp
    ssd: SsdOp
    self_attention: SelfAttentionOp  # of mixers that keep nothing

    def __str__(self) -> str:
        ops = (self.conv, self.delta, self.ssd)
        return " and ".join(dict.fromkeys(repr(op.name) for op in ops))


def on_shards(
    compute: Callable[..., Any],
    operands: tuple[Any, ...],
    axes: tuple[Axes, ...],
    out_axes: Any,
    mesh: Mesh | None,
) -> Any:
    """Compute on each device, without communication. `axes` are those of the operands, `out_axes`
    those of the results, which may be a tree of tuples of `Axes`."""
    if mesh is None or num_pieces(mesh, ("heads",)) == 1:
        return compute(*operands)
    return jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=tuple(map(partition_spec, axes)),
        out_specs=jax.tree.map(partition_spec, out_axes, is_leaf=_is_axes),
        check_vma=False,
    )(*operands)


def _is_axes(value: Any) -> bool:
    return isinstance(value, tuple) and all(name is None or isinstance(name, str) for name in value)
