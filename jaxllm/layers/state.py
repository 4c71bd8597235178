"""What a mixer keeps of a request in place of keys and values: a state, which does not grow.

A mixer declares the arrays of its state by a `StateConfig`. The runner keeps them for every slot,
and gives all of them to the mixer, which hands them to its ops and returns them updated. So they
travel as a cache of pages does. Which slots a step's rows have, and which rows begin with zeros, is
in `StepContext.state_rows`.

In a step whose rows may have drafts, a mixer returns `UnverifiedStates`: rows with drafts leave the
states before these. When the step knows which drafts are right, it lets the states go on over them
(`runner.verified_states`).
"""

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
from jaxllm_kernels.recurrent.copies import StateCopies
from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.row_sums.api import RowSums
from jaxllm_kernels.ssd.api import SsdOp

from jaxllm.parallel.sharding import Axes, num_pieces, partition_spec, sharding

# The arrays of a mixer's state, each [S, ...].
States = tuple[jax.Array, ...]


class StateArray(NamedTuple):
    """An array of a mixer's state, of one slot and over all shards."""

    shape: tuple[int, ...]
    dtype: Any
    axes: Axes
    # Of a short convolution's inputs, over so many tokens; the op may keep more of them.
    width: int | None = None

    def of_slots(self, num_slots: int, mesh: Mesh, ops: "StateOps | None") -> jax.ShapeDtypeStruct:
        """The array for all slots, on the devices of a mesh."""
        shape = self.shape
        if self.width is not None:
            assert ops is not None, "the plan has no ops with states"
            shape = (ops.conv.num_inputs(self.width), *shape[1:])
        return jax.ShapeDtypeStruct(
            (num_slots, *shape), self.dtype, sharding=sharding(mesh, (None, *self.axes))
        )


class KeptArray(NamedTuple):
    """An array of what an op gets of drafts: of one draft and over all shards, which cut its first
    axis."""

    shape: tuple[int, ...]
    dtype: Any
    is_shared: bool = False  # by all drafts of a step


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """The state of a mixer."""

    arrays: tuple[StateArray, ...]
    # What the ops of these arrays get of drafts: `Drafts` of KeptArrays.
    drafts: tuple[Any, ...]

    def of_slots(
        self, num_slots: int, mesh: Mesh, ops: "StateOps | None"
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Its arrays for all slots, on the devices of a mesh."""
        return tuple(array.of_slots(num_slots, mesh, ops) for array in self.arrays)

    def kept(self, num_drafts: int, mesh: Mesh) -> tuple["Drafts", ...]:
        """What a step keeps of so many drafts, on the devices of a mesh."""

        def of_all(one: KeptArray) -> jax.ShapeDtypeStruct:
            shape = (1 if one.is_shared else num_drafts, *one.shape)
            return jax.ShapeDtypeStruct(shape, one.dtype, sharding=sharding(mesh, (None, "heads")))

        return jax.tree.map(of_all, self.drafts, is_leaf=lambda its: isinstance(its, KeptArray))


def last_inputs(width: int, num_channels: int, dtype: DTypeLike) -> StateArray:
    """What a short convolution over `width` tokens keeps: its inputs, cut by channels."""
    return StateArray((width - 1, num_channels), state_dtype(dtype), (None, "heads"), width)


def head_matrices(num_heads: int, rows: int, columns: int) -> StateArray:
    """A matrix for each head."""
    return StateArray((num_heads, rows, columns), jnp.float32, ("heads",))


@dataclass(frozen=True, kw_only=True)
class StateOps:
    """The implementations of the ops with states. The plan chooses them."""

    conv: ConvOp
    delta: DeltaOp
    ssd: SsdOp
    copies: StateCopies  # to and from snapshots
    self_attention: SelfAttentionOp  # of mixers that keep nothing
    row_sums: RowSums | None = None  # None: XLA adds up

    def __str__(self) -> str:
        ops = (self.conv, self.delta, self.ssd)
        return " and ".join(dict.fromkeys(repr(op.name) for op in ops))


class ConvDrafts(NamedTuple):
    """What a convolution gets of drafts."""

    x: jax.Array  # [M * k, C]

    def advance(self, ops: StateOps, state: jax.Array, rows: StateRows) -> jax.Array:
        """The states after the drafts that are right."""
        no_taps = jnp.zeros((state.shape[1] + 1, state.shape[2]), self.x.dtype)
        return ops.conv(self.x, no_taps, None, state, rows, activation=None)[1]


class DeltaDrafts(NamedTuple):
    """What the gated delta rule gets of drafts."""

    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array

    def advance(self, ops: StateOps, state: jax.Array, rows: StateRows) -> jax.Array:
        """The states after the drafts that are right."""
        return ops.delta(self.k, *self, state, rows)[1]


class SsdDrafts(NamedTuple):
    """What the state space of Mamba2 gets of drafts."""

    x: jax.Array
    b: jax.Array
    step: jax.Array
    rate: jax.Array  # float32 [1, N]

    def advance(self, ops: StateOps, state: jax.Array, rows: StateRows) -> jax.Array:
        """The states after the drafts that are right."""
        return ops.ssd(self.x, self.b, self.b, self.step, self.rate[0], state, rows)[1]


Drafts = ConvDrafts | DeltaDrafts | SsdDrafts


class UnverifiedStates(NamedTuple):
    """The arrays of a mixer's state. The rows with drafts have left the states before these."""

    states: States
    drafts: tuple[Drafts, ...]  # for each array

    def advance(self, ops: StateOps, rows: StateRows, mesh: Mesh | None) -> States:
        """The states after the drafts that are right: `rows` are `rows_of_drafts`."""

        def of_device(states: States, drafts: tuple[Drafts, ...], rows: StateRows) -> States:
            its = zip(states, drafts, strict=True)
            return tuple(of_array.advance(ops, state, rows) for state, of_array in its)

        axes = tuple(_AXES[type(of_array)] for of_array in self.drafts)
        operands = (self.states, self.drafts, rows)
        return on_shards(of_device, operands, (axes, (None, "heads"), ()), axes, mesh)

    @classmethod
    def or_states(cls, states: States, drafts: tuple[Drafts, ...]) -> "States | UnverifiedStates":
        """The states alone if no row of the step can have drafts."""
        return cls(states, drafts) if drafts else states


# Of the arrays [S, ...] of these ops.
_AXES: dict[type, Axes] = {
    ConvDrafts: (None, None, "heads"),
    DeltaDrafts: (None, "heads"),
    SsdDrafts: (None, "heads"),
}


def of_drafts(rows: StateRows, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The operands [T, ...] of the drafts of a step, [M * k, ...]."""
    assert rows.drafts is not None
    return tuple(x.at[rows.drafts.tokens].get(mode="clip") for x in operands)


def on_shards(
    compute: Callable[..., Any],
    operands: tuple[Any, ...],
    axes: tuple[Any, ...],
    out_axes: Any,
    mesh: Mesh | None,
) -> Any:
    """Compute on each device, without communication. `axes` are those of the operands, `out_axes`
    those of the results. Both may be trees of tuples of `Axes`."""
    if mesh is None or num_pieces(mesh, ("heads",)) == 1:
        return compute(*operands)
    return jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=jax.tree.map(partition_spec, axes, is_leaf=_is_axes),
        out_specs=jax.tree.map(partition_spec, out_axes, is_leaf=_is_axes),
        check_vma=False,
    )(*operands)


def _is_axes(value: Any) -> bool:
    return isinstance(value, tuple) and all(name is None or isinstance(name, str) for name in value)
